"""Times as whole numbers of ticks.

Fractions are slow and floats round. So exact costs are brought to one denominator: a *tick* is so
short that every time is a whole number of ticks, and millions of operations are timed with integer
arithmetic.

Costs with 17 decimal digits make ticks so short that times need more than 64 bits. A list keeps
such times as bytes (:class:`Wide`). An array keeps each time as a row of *limbs*: 64-bit integers
that represent 32 bits each, the lowest first, so t = limb0 + 2^32 limb1 + 2^64 limb2. Rows are
added limb by limb without carries, as a limb has room for 2^31 sums; carries are computed only to
compare or to store times. numpy copies a row, as one element of raw bytes, as fast as a number.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from math import lcm
from typing import Any, cast, overload

import numpy as np
from numpy.typing import NDArray

from megapipe.schedule.cost import Time, plain

Numbers = NDArray[Any]
"""Array of times: 64-bit numbers, Python numbers, or rows of limbs (see the module)."""
LIMB = 32
"""Number of a time's bits in each limb; the highest limb has the sign and all remaining bits."""
_LOW = (1 << LIMB) - 1


def per_unit(times: Iterable[Time]) -> int:
    """Return the least number of ticks in a unit of time that makes all these times whole
    numbers."""
    return lcm(*{time.denominator for time in times if isinstance(time, Fraction)})


def whole(time: Time, ticks: int) -> int:
    """Convert a time to ticks, with `ticks` ticks per unit of time; the result must be whole."""
    number = plain(time * ticks)
    assert isinstance(number, int)
    return number


def width(largest: int) -> int:
    """Return the number of limbs for numbers up to `largest`; 1: 64 bits suffice."""
    bits = largest.bit_length()
    return 1 if bits < 64 else 1 + -(-(bits - 62) // LIMB)


class Wide:
    """Packed list of integers of more than 64 bits: 4 bytes per limb, 8 for the highest."""

    def __init__(self, width: int, numbers: Iterable[int] = ()) -> None:
        self.width = width
        self._size = 4 * width + 4
        self._bytes = bytearray()
        for number in numbers:
            self.append(number)

    @classmethod
    def of(cls, rows: Numbers) -> "Wide":
        """Build the list from an array of rows of limbs."""
        wide = cls(rows.itemsize // 8)
        halves = np.empty((len(rows), wide.width + 1), np.uint32)
        carry: Any = 0
        for place, limbs in enumerate(_limbs(rows).T):
            carried = limbs + carry
            halves[:, place], carry = carried & _LOW, carried >> LIMB
        halves[:, -1] = carry & _LOW
        wide._bytes += halves.tobytes()
        return wide

    @property
    def rows(self) -> Numbers:
        """The numbers as an array of rows of limbs."""
        halves = np.frombuffer(self._bytes, np.uint32).reshape(-1, self.width + 1)
        limbs = halves[:, :-1].astype(np.int64)
        limbs[:, -1] += halves[:, -1].astype(np.int32).astype(np.int64) << LIMB
        return limbs.view(f"V{8 * self.width}").ravel()

    def __len__(self) -> int:
        return len(self._bytes) // self._size

    def __iter__(self) -> Iterator[int]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> int:
        if index < 0:
            index += len(self)
        here = index * self._size
        packed = self._bytes[here : here + self._size]
        if not packed:
            raise IndexError(index)
        return int.from_bytes(packed, "little", signed=True)

    def append(self, number: int) -> None:
        self._bytes += number.to_bytes(self._size, "little", signed=True)

    def extend(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.append(number)


def _limbs(rows: Numbers) -> Numbers:
    """Return a view [numbers, limbs]; a 64-bit number is one limb."""
    return rows.view(np.int64).reshape(len(rows), rows.itemsize // 8)


def signs(numbers: Numbers) -> Numbers:
    """Return a view of each number's highest limb, which has the sign of the number."""
    return _limbs(numbers)[:, -1]


def add(first: Numbers, second: Numbers) -> Numbers:
    """Add two arrays, element by element."""
    if first.dtype.kind != "V":
        return first + second
    return (first.view(np.int64) + second.view(np.int64)).view(first.dtype)


def later(first: Numbers, second: Numbers) -> Numbers:
    """Return the greater number of each pair, element by element."""
    if first.dtype.kind != "V":
        return np.maximum(first, second)
    over = _high(first.view(np.int64) - second.view(np.int64), first.itemsize // 8)
    return np.where(over < 0, second, first)


def _high(limbs: Numbers, width: int) -> Numbers:
    """Return the highest limb of each number after carries, which has the sign of the number.
    `limbs`: all limbs of all numbers; `width`: limbs per number."""
    high = limbs[::width]
    for place in range(1, width):
        high = limbs[place::width] + (high >> LIMB)
    return high


def differences(first: Numbers, second: Numbers) -> Numbers:
    """Subtract two arrays, element by element. The result has 64-bit numbers, or Python numbers if
    these do not suffice."""
    if first.dtype.kind != "V":
        return first - second
    result = first.view(np.int64) - second.view(np.int64)
    high = _high(result, first.itemsize // 8)
    if first.itemsize > 16 or (np.abs(high) >> 62 - LIMB).any():
        return np.array(unpacked(result.view(first.dtype)), object)
    return (high << LIMB) + (result[::2] & _LOW)


def total(times: "Sequence[Time] | Wide | Numbers") -> Time:
    """Return the sum of times. It may need more bits than any of them."""
    if isinstance(times, Wide):
        return sum(
            _total(limbs) << LIMB * place for place, limbs in enumerate(_limbs(times.rows).T)
        )
    numbers = np.array(times) if isinstance(times, array) and times.typecode == "q" else times
    if isinstance(numbers, np.ndarray) and numbers.dtype == np.int64:
        return _total(numbers)
    return sum(numbers)


def _total(numbers: Numbers) -> int:
    return (int((numbers >> LIMB).sum()) << LIMB) + int((numbers & _LOW).sum())


def unpacked(numbers: Numbers) -> list[Time]:
    """Return an array of numbers or rows of limbs as Python numbers."""
    return [*Wide.of(numbers)] if numbers.dtype.kind == "V" else numbers.tolist()


def listed(numbers: Numbers) -> list[Time]:
    """Return an array of numbers or rows of limbs as a list, packed if 64 bits are enough."""
    return unpacked(numbers) if numbers.dtype.kind == "V" else kept(numbers)


def kept(numbers: Numbers) -> list[Time]:
    """Return an array of numbers or rows of limbs as a packed list."""
    if numbers.dtype.kind == "V":
        return cast("list[Time]", Wide.of(numbers))
    return cast("list[Time]", array("q" if numbers.dtype.kind == "i" else "d", numbers.tobytes()))


def room(value: Time, count: int, largest: Time) -> list[Time]:
    """Return a list of `count` elements, all `value`. Its elements can be floats if `largest` is a
    float, else integers up to `largest`; the list is packed if 64 bits are enough."""
    if isinstance(largest, float):
        return cast("list[Time]", array("d", [float(value)]) * count)
    numbers = [int(value)]
    narrow = width(int(largest)) == 1
    return cast("list[Time]", (array("q", numbers) if narrow else numbers) * count)


class Scaled(Sequence[Time]):
    """View of a sequence of ticks as times, with `per_unit` ticks per unit of time."""

    def __init__(self, ticks: Sequence[Time], per_unit: int) -> None:
        self._ticks, self._per_unit = ticks, per_unit

    def __len__(self) -> int:
        return len(self._ticks)

    @overload
    def __getitem__(self, index: int) -> Time: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Time]: ...
    def __getitem__(self, index: int | slice) -> Time | Sequence[Time]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        return scaled(self._ticks[index], self._per_unit)


def scaled(ticks: Time, per_unit: int) -> Time:
    """Convert ticks to a time, with `per_unit` ticks per unit of time."""
    return ticks if per_unit == 1 else plain(Fraction(ticks) / per_unit)
