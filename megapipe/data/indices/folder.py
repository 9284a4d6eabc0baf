"""Arrays that one process of a node computes, and all read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megapipe.data.prepare.once import build_once
from megapipe.data.stored import Array, StoredArray, StoredFile, write_checksums
from megapipe.errors import DataError

Save = Callable[[str, Array], None]
Form = tuple[tuple[int | None, ...], str]
"""The shape and the type of an array; None: a size that is not known before."""


def stored_arrays(
    folder: Path,
    forms: Mapping[str, Form],
    compute: Callable[[Save], None],
    note: Callable[[str], None] | None = None,
) -> dict[str, StoredArray]:
    """The arrays of a folder, by name, of which each process reads what it needs.

    If the folder is not there, one of the processes that share its file system computes them, and
    the others wait for it (:func:`~megapipe.data.prepare.once.build_once`).

    Args:
        folder: named by all that decides the content.
        forms: what is expected of each array.
        compute: hands each array with its name to the function it is given, which writes it.
        note: given a line when there is another process to wait for; by default it goes to stderr.

    Raises:
        DataError: the folder cannot be written, or what is there is damaged.
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
        where = error.filename or folder
        raise DataError(f"indices {where}: {error.strerror or error}") from error
    return {name: _stored(folder, name, form) for name, form in forms.items()}


def _stored(folder: Path, name: str, form: Form) -> StoredArray:
    path, repair = folder / f"{name}.npy", f"remove {folder} to have it made again"
    try:
        with path.open("rb") as file:
            shape, dtype = _header(file)
            begin, size = file.tell(), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}: {repair}") from error
    except Exception as error:  # a header that is overwritten: of the parsers that NumPy asks
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
    stored.read(0, begin)  # as its checksum says
    return StoredArray(stored, dtype, begin, shape)


def _header(file: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array that ``np.save`` has written. Raises ValueError."""
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError("another version")
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran_order and len(shape) > 1:
        raise ValueError("another order")
    return shape, dtype
