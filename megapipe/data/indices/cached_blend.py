"""The index of a blend, from a cache that all processes of a node share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from megapipe.data.indices.blend import blend_index
from megapipe.data.indices.folder import Save, stored_arrays
from megapipe.data.indices.shares import BlendSizes
from megapipe.data.stored import StoredArray

_FORMAT = 1
"""Version of the cached arrays; increased when the same blend would give other arrays."""


def open_blend(
    blend: BlendSizes, cache: Path, note: Callable[[str], None] | None = None
) -> tuple[StoredArray, StoredArray]:
    """Return the index of a blend: the source of each sample, and the sample's number in that
    source. One of the processes that share `cache` computes it.

    Args:
        blend: sizes of the blend.
        cache: folder in which each blend index has a subfolder.
        note: called with a line of text if another process must be awaited; default: print it to
            stderr.

    Raises:
        ConfigError: a weight is not positive, or there are too many sources.
        DataError: the cache cannot be written, or its content is damaged.
    """
    size, asked = blend.size, [share.hex() for share in blend.shares]

    def compute(save: Save) -> None:
        sources, numbers = blend_index(blend.shares, size)
        save("dataset_index", sources)
        save("dataset_sample_index", numbers)

    name = hashlib.sha256(json.dumps(["blend", _FORMAT, size, asked]).encode()).hexdigest()
    forms = {"dataset_index": ((size,), "<i2"), "dataset_sample_index": ((size,), "<i8")}
    arrays = stored_arrays(cache / name, forms, compute, note)
    return arrays["dataset_index"], arrays["dataset_sample_index"]
