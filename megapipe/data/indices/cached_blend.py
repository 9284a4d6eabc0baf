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
"""Raised when the same blend would come out as other arrays."""


def open_blend(
    blend: BlendSizes, cache: Path, note: Callable[[str], None] | None = None
) -> tuple[StoredArray, StoredArray]:
    """The index of a blend, computed by one of the processes that share `cache`.

    Args:
        blend: its sizes.
        cache: the folder for all such indices; they get one of their own in it.
        note: see :func:`~megapipe.data.indices.folder.stored_arrays`.

    Raises:
        ConfigError: as :func:`~megapipe.data.indices.blend.blend_index`.
        DataError: the cache cannot be written, or what is there is damaged.
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
