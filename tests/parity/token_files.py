"""Token files of many short documents."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megapipe.data.stored import write_checksums
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import bin_of, idx_of

ROWS = 40_000
"""Number of documents: arrays take several blocks each."""


def written(prefix: Path, *, checked: bool = True) -> Path:
    """Write a token file of documents of four tokens."""
    with TokenWriter(prefix, np.dtype("<u2")) as writer:
        writer.write(np.arange(4 * ROWS) % 251)
        writer.close_documents([4] * ROWS)
    if checked:
        write_checksums(bin_of(prefix))
        write_checksums(idx_of(prefix))
    return prefix
