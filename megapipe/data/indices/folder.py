"""Arrays in files, computed by one process of a node and read by all."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megapipe.data.prepare.build_once import build_once
from megapipe.data.stored import Array, StoredArray, StoredFile, write_checksums
from megapipe.errors import DataError

Save = Callable[[str, Array], None]
Form = tuple[tuple[int | None, ...], str]
"""Expected shape and type of an array; a size is None if it is not known in advance."""


def stored_arrays(
    folder: Path,
    forms: Mapping[str, Form],
    compute: Callable[[Save], None],
    note: Callable[[str], None] | None = None,
) -> dict[str, StoredArray]:
    """Return the arrays that `folder` holds, by name; a process later reads only the rows that it
    needs.

    If the folder does not exist, one of the processes that share its file system computes the
    arrays, and the others wait for it (:func:`~megapipe.data.prepare.build_once.build_once`).

    Args:
        folder: path; its name must depend on everything that determines the content.
        forms: expected shape and type of each array, by name.
        compute: function that computes the arrays. Its argument is a function `save(name, array)`,
            which it calls to write each array.
        note: called with a line of text if another process must be awaited; default: print it to
            stderr.

    Raises:
        DataError: the folder cannot be written, or its content is damaged.
    """

    def fill(new: Path) -> None:
        def save(name: str, array: Array) -> None:
            path = new / f"{name}.npy"
            with open(path, "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            write_checksums(path)

        compute(save)

    try:
        if not folder.exists():
            build_once(folder, fill, note)
    except OSError as error:
        named = error.filename or folder
        raise DataError(f"indices {named}: {error.strerror or error}") from error
    return {name: _stored(folder, name, form) for name, form in forms.items()}


def _stored(folder: Path, name: str, form: Form) -> StoredArray:
    path, repair = folder / f"{name}.npy", f"remove {folder} and it is rebuilt"
    try:
        with path.open("rb") as file:
            shape, dtype = _header(file)
            begin, size = file.tell(), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}: {repair}") from error
    except Exception as error:  # a damaged header; NumPy's parsers raise many types
        raise DataError(f"{path} is damaged: {repair}") from error
    if dtype.hasobject or size != begin + math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path} is damaged: {repair}")
    sizes = tuple(
        found if wanted is None else wanted
        for found, wanted in itertools.zip_longest(shape, form[0], fillvalue=-1)
    )
    if (shape, dtype) != (sizes, np.dtype(form[1])):
        raise DataError(
            f"{path} has shape {shape} of {dtype}, not {form[0]} of {form[1]}: {repair}"
        )
    stored = StoredFile(path)
    stored.read(0, begin)  # compares the header with its checksum
    return StoredArray(stored, dtype, begin, shape)


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of an array in a file of ``np.save``. Raises ValueError."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("another version")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran_order and len(shape) > 1:
        raise ValueError("another order")
    return shape, dtype
