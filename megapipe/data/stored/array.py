"""Arrays in files, of which a process reads what it asks for."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.stored.file import StoredFile
from megapipe.errors import DataError

Array = npt.NDArray[Any]

AT_ONCE = 2**20
"""Rows of a part, see :meth:`StoredArray.parts`."""
_DENSE = 8
"""Numbers of rows are looked up in a single range of the file if it has no more rows for each."""
_WINDOW = 512
"""Rows that are read where one is asked for: its neighbours are often asked for next."""


class StoredArray:
    """A read-only array in a file, from byte `offset` on: rows by a number, by a slice without a
    step, or by an array of numbers [n].

    Every read raises DataError where the file was cut or differs from its checksums.
    """

    def __init__(
        self, file: StoredFile, dtype: np.dtype[Any] | str, offset: int, shape: tuple[int, ...]
    ) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._offset = offset
        self._row = self.dtype.itemsize * math.prod(shape[1:])
        self._held: Array | None = None
        self._window: tuple[int, Array] = (0, np.empty(0, self.dtype))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return len(self) * self._row

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def __getitem__(self, key: int | slice | Array) -> Any:
        if self._held is not None:
            return self._held[key]
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, "rows are read as they follow one another"
            return self.rows(start, max(start, stop))
        if isinstance(key, np.ndarray):
            return self._rows_of(key)
        return self._row_at(operator.index(key))

    def rows(self, start: int, stop: int) -> Array:
        """The rows start .. stop-1. Raises DataError too if there are no such rows."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise DataError(
                f"{self.file.path} has {len(self)} rows, not {start} to {stop}: it, or the file "
                "that names them, is damaged"
            )
        if self._held is not None:
            return self._held[start:stop]
        at = self._offset
        return self._as_rows(self.file.read(at + start * self._row, at + stop * self._row))

    def parts(self, start: int = 0, stop: int | None = None) -> Iterator[Array]:
        """The rows start .. stop-1, by default all, some at a time."""
        stop = len(self) if stop is None else stop
        for first in range(start, stop, AT_ONCE):
            yield self[first : min(first + AT_ONCE, stop)]

    def pairs(self, numbers: Array) -> tuple[list[int], list[int]]:
        """Of an array of integers [N], those at some numbers [n], and those that follow each."""
        if self._held is not None:
            return self._held[numbers].tolist(), self._held[numbers + 1].tolist()
        both = self._each(numbers, 2).tolist()
        return both[::2], both[1::2]

    @property
    def held(self) -> bool:
        """Whether all of it is in memory."""
        return self._held is not None

    def hold(self) -> None:
        """Read all of it, once."""
        self._held = self[:]

    def _row_at(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)} in {self.file.path}")
        number %= len(self)
        first, some = self._window
        if not 0 <= number - first < len(some):
            first = number - number % _WINDOW
            some = self.rows(first, min(first + _WINDOW, len(self)))
            self._window = first, some  # at once: other threads may read too
        return some[number - first]

    def _rows_of(self, numbers: Array) -> Array:
        if not len(numbers):
            return self.rows(0, 0)
        low, high = int(numbers.min()), int(numbers.max())
        if not 0 <= low <= high < len(self):
            raise IndexError(f"rows {low} to {high} of {len(self)} in {self.file.path}")
        if high - low < _DENSE * len(numbers):
            return self.rows(low, high + 1)[numbers - low]
        return self._each(numbers, 1)

    def _each(self, numbers: Array, rows: int) -> Array:
        """So many rows from each number on, one run after the other."""
        starts = [self._offset + number * self._row for number in numbers.tolist()]
        return self._as_rows(self.file.read_each(starts, [rows * self._row] * len(starts)))

    def _as_rows(self, content: bytes | memoryview) -> Array:
        found = np.frombuffer(content, self.dtype)
        return found if len(self.shape) == 1 else found.reshape(-1, *self.shape[1:])
