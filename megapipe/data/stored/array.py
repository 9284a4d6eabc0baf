"""Arrays in files; a process reads only the rows that it requests."""

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
"""Number of rows that :meth:`StoredArray.parts` yields at a time."""
_DENSE = 8
"""Ratio of the requested rows' range to their number. Below it, the whole range is read."""
_WINDOW = 512
"""Number of rows read when one row is requested, as neighbouring rows are often requested next."""


class StoredArray:
    """A read-only array in a file, from byte `offset` on. An index is a row number, a slice without
    a step, or an array of row numbers [n].

    Every read raises DataError if the file was truncated or differs from its checksums.
    """

    def __init__(
        self, file: StoredFile, dtype: np.dtype[Any] | str, offset: int, shape: tuple[int, ...]
    ) -> None:
        self.file = file
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self._offset = offset
        self._row = self.dtype.itemsize * math.prod(shape[1:])
        self._values: Array | None = None
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
        if self._values is not None:
            return self._values[key]
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            assert step == 1, "rows are read as they follow one another"
            return self.rows(start, max(start, stop))
        if isinstance(key, np.ndarray):
            return self._rows_of(key)
        return self._row_at(operator.index(key))

    def rows(self, start: int, stop: int) -> Array:
        """Return the rows start .. stop-1. Raises DataError if they are outside the array."""
        if not 0 <= start <= stop <= self.shape[0]:
            raise DataError(
                f"{self.file.path} has {len(self)} rows, not {start} to {stop}: it, or the file "
                "that names them, is damaged"
            )
        if self._values is not None:
            return self._values[start:stop]
        at = self._offset
        return self._as_rows(self.file.read(at + start * self._row, at + stop * self._row))

    def parts(self, start: int = 0, stop: int | None = None) -> Iterator[Array]:
        """Yield the rows start .. stop-1 (default: all), at most :data:`AT_ONCE` at a time."""
        stop = len(self) if stop is None else stop
        for first in range(start, stop, AT_ONCE):
            yield self[first : min(first + AT_ONCE, stop)]

    def pairs(self, numbers: Array) -> tuple[list[int], list[int]]:
        """Return the values at the indices `numbers` [n] of this one-dimensional array of integers,
        and the values at the indices `numbers` + 1."""
        if self._values is not None:
            return self._values[numbers].tolist(), self._values[numbers + 1].tolist()
        both = self._each(numbers, 2).tolist()
        return both[::2], both[1::2]

    @property
    def is_in_memory(self) -> bool:
        """Whether the whole array is in memory."""
        return self._values is not None

    def hold(self) -> None:
        """Read the whole array into memory."""
        self._values = self[:]

    def _row_at(self, number: int) -> Any:
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} of {len(self)} in {self.file.path}")
        number %= len(self)
        first, some = self._window
        if not 0 <= number - first < len(some):
            first = number - number % _WINDOW
            some = self.rows(first, min(first + _WINDOW, len(self)))
            self._window = first, some  # one assignment: other threads may read too
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
        """Return `rows` consecutive rows from each row number in `numbers` on, concatenated."""
        starts = [self._offset + number * self._row for number in numbers.tolist()]
        return self._as_rows(self.file.read_each(starts, [rows * self._row] * len(starts)))

    def _as_rows(self, content: bytes | memoryview) -> Array:
        found = np.frombuffer(content, self.dtype)
        return found if len(self.shape) == 1 else found.reshape(-1, *self.shape[1:])
