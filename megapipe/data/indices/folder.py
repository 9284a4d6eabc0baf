"""Arrays that one process of a node computes, and all map into memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.prepare.once import make_once
from megapipe.errors import DataError

Array = npt.NDArray[Any]
Save = Callable[[str, Array], None]
Form = tuple[tuple[int | None, ...], str]
"""The shape and the type of an array; None: a size that is not known before."""


def mapped_arrays(
    folder: Path,
    forms: Mapping[str, Form],
    compute: Callable[[Save], None],
    note: Callable[[str], None] | None = None,
) -> dict[str, Array]:
    """The arrays of a folder, by name, which all processes of a node share in memory.

    If the folder is not there, one of the processes that share its file system computes them, and
    the others wait for it (:func:`~megapipe.data.prepare.once.make_once`).

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
            with open(new / f"{name}.npy", "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())

        compute(save)

    try:
        if not folder.exists():
            make_once(folder, fill, note)
    except OSError as error:
        where = error.filename or folder
        raise DataError(f"indices {where}: {error.strerror or error}") from error
    return {name: _mapped(folder, name, form) for name, form in forms.items()}


def _mapped(folder: Path, name: str, form: Form) -> Array:
    path, repair = folder / f"{name}.npy", f"remove {folder} to have it made again"
    try:
        if form[0][0] == 0:
            array = np.load(path)  # nothing cannot be mapped
        else:
            with np.errstate(over="ignore"):
                array = np.load(path, mmap_mode="r")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}: {repair}") from error
    except (ValueError, EOFError, MemoryError, OverflowError) as error:
        raise DataError(f"{path} is damaged: {repair}") from error
    sizes = tuple(
        found if wanted is None else wanted
        for found, wanted in itertools.zip_longest(array.shape, form[0], fillvalue=-1)
    )
    if (array.shape, array.dtype) != (sizes, np.dtype(form[1])):
        raise DataError(
            f"{path} has shape {array.shape} of {array.dtype}, not {form[0]} of {form[1]}: {repair}"
        )
    return np.asarray(array)  # the same memory; slices of a memmap are slow
