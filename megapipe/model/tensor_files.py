"""The safetensors files of a folder, one or several with an index; tensors are read by slices."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megapipe.errors import CheckpointError
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.text import one_line
from megapipe.util.dtypes import Dtype

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Types that weights may have, by their names in safetensors."""


@dataclass(frozen=True)
class StoredTensor:
    """File, type and shape of a tensor."""

    file: str
    dtype: str
    """Name of the tensor's type in safetensors."""
    shape: tuple[int, ...]


class StoredTensors(ABC):
    """Tensors in files of a folder; none is kept in memory."""

    rows_at_once = 4096
    """Number of rows that :meth:`equal` compares at a time."""

    def __init__(self, folder: Path, tensors: dict[str, StoredTensor]) -> None:
        self.folder = folder
        self.tensors = tensors

    @property
    @abstractmethod
    def files(self) -> list[str]:
        """Names of the files."""

    @property
    def note(self) -> str | None:
        """A line of text about something unexpected in the files; None if there is nothing."""
        return None

    @abstractmethod
    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return the slices `index` of a tensor (default: all of it) as a new contiguous tensor.
        Raises CheckpointError."""

    def equal(self, a: str, b: str) -> bool:
        """Whether two tensors have the same shape, type and values. Raises CheckpointError."""
        one, other = self.tensors[a], self.tensors[b]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        rows = self.rows_at_once
        blocks = ((slice(row, row + rows),) for row in range(0, one.shape[0], rows))
        return all(torch.equal(self.read(a, block), self.read(b, block)) for block in blocks)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor. Raises CheckpointError for a type that cannot be read."""
        stored = self.tensors[name]
        if stored.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.folder / stored.file}: tensor {name} is {stored.dtype}; expected one of "
                f"{', '.join(DTYPES)}"
            )
        return DTYPES[stored.dtype]


class TensorFiles(StoredTensors):
    """Tensors in safetensors files. Make one with :meth:`open`."""

    @classmethod
    def open(cls, folder: Path) -> TensorFiles:
        """Read the headers of all files.

        Raises:
            CheckpointError: a file is missing, damaged, or differs from the index.
        """
        index = _read_index(folder)
        tensors: dict[str, StoredTensor] = {}
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            if not (folder / file).is_file():
                raise CheckpointError(f"{folder}: the shard {file} is missing, which {INDEX} names")
            found = _read_header(folder / file)
            wanted = (
                found
                if index is None
                else {n for n, named_file in index.items() if named_file == file}
            )
            if odd := sorted(found.keys() ^ set(wanted)):
                present_in, absent_in = (file, INDEX) if odd[0] in found else (INDEX, file)
                raise CheckpointError(
                    f"{folder}: tensor {odd[0]} is in {present_in} but not in {absent_in} "
                    f"({len(odd)} such tensors)"
                )
            tensors |= found
        return cls(folder, tensors)

    @property
    def files(self) -> list[str]:
        """Names of the files."""
        return sorted({stored.file for stored in self.tensors.values()})

    @property
    def note(self) -> str | None:
        """A line of text about files that exist and are not read; None if there are none."""
        if self.files == [SINGLE] and (self.folder / INDEX).exists():
            return (
                f"{self.folder / SINGLE} is read, as transformers does, and {INDEX} in the "
                "same folder is not"
            )
        return None

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return the slices `index` of a tensor (default: all of it) as a new contiguous tensor.
        Only these slices are read from the file."""
        path = self.folder / self.tensors[name].file
        self.dtype(name)
        try:
            with safe_open(path, framework="pt") as file:
                mapped = file.get_slice(name)[index or (slice(None),)]
                return mapped.clone(memory_format=torch.contiguous_format)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: tensor {name}: {one_line(error)}") from error


def widest(dtypes: Iterable[torch.dtype]) -> Dtype:
    """Return the type that holds all values of one or more types of weights."""
    found, *others = dtypes
    for dtype in others:
        found = torch.promote_types(found, dtype)
    return next(name for name in get_args(Dtype) if TORCH_DTYPES[name] == found)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Return the index: each tensor's file. A single file has priority; then return None."""
    path = folder / INDEX
    if (folder / SINGLE).is_file():
        return None
    if not path.exists():
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        other = f"; {pickled[0]} is pickled, and not read" if pickled else ""
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}{other}")
    content = read_json(path)
    index = content.get("weight_map")
    if not isinstance(index, dict) or not index:
        raise CheckpointError(f"{path}: it has no weight_map")
    for name, file in index.items():
        if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
            raise CheckpointError(f"{path}: {file!a}, for tensor {name}, is not a file name")
    return index


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return content


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = ((name, file.get_slice(name)) for name in file.keys())  # noqa: SIM118
            return {
                name: StoredTensor(path.name, found.get_dtype(), tuple(found.get_shape()))
                for name, found in slices
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file: {one_line(error)}"
        ) from None
