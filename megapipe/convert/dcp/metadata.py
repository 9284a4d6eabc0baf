"""Reads the pickled index of a DCP folder without running code that the pickle names."""

from __future__ import annotations

import pickle
from enum import EnumMeta
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from megapipe.convert.dcp import METADATA
from megapipe.convert.pickles import StandIn, is_beside_weights, untrusted
from megapipe.errors import CheckpointError
from megapipe.text import one_line

_OWN = (
    *(metadata.Metadata, metadata.TensorStorageMetadata, metadata.BytesStorageMetadata),
    *(metadata.ChunkStorageMetadata, metadata.TensorProperties, metadata.MetadataIndex),
    *(metadata.StorageMeta, metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
)
"""Plain-data classes in an index; creating an object of such a class runs no other code."""
_CLASSES: dict[str, Any] = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _OWN} | {
    # of sharded tensors in older versions
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": metadata.TensorProperties,
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": (
        metadata._MEM_FORMAT_ENCODING
    ),
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": torch.serialization._get_layout,
    "pathlib.PosixPath": PurePosixPath,
    "pathlib._local.PosixPath": PurePosixPath,
}


def read_metadata(folder: Path, *, trust: bool = False) -> Metadata:
    """Return the index of a DCP folder. With `trust` the index may run any code, as in torch
    itself.

    Raises:
        CheckpointError: the index is missing or damaged, or runs code and is not trusted.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = pickle.load(file) if trust else _Unpickler(file, path).load()
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # whatever damage raises, or code of a trusted file
        raise CheckpointError(f"{path} is not a complete DCP index: {one_line(error)}") from None
    if not (
        isinstance(found, Metadata)
        and isinstance(found.state_dict_metadata, dict)
        and isinstance(found.storage_data, dict)
    ):
        raise CheckpointError(f"{path} is not a DCP index")
    return found


class _Unpickler(pickle.Unpickler):
    """Unpickler that accepts only the names of classes and functions that an index needs."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that the pickle names. Raises CheckpointError for a name
        that is not allowed."""
        full = f"{module}.{name}"
        if full in _CLASSES:
            return _CLASSES[full]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if full == "builtins.getattr":
            return _member
        if module.startswith("megatron.") and name == "MCoreMetadata":
            return Metadata  # megatron-core 0.15: the same fields
        if is_beside_weights(full):
            return StandIn
        raise untrusted(self._path, full)


def _member(kind: Any, name: str) -> Any:
    """Return an enumeration's member: Python 3.11 pickles a member as an attribute of its class."""
    return kind[name] if isinstance(kind, EnumMeta) else StandIn()
