"""Times as whole numbers of ticks.

Fractions are slow and floats round. So exact costs are brought to one denominator: a *tick* is so
short that every time is a whole number of ticks, and what happens to millions of operations is
arithmetic of whole numbers.

Decimals of 17 digits make ticks so short that their numbers need more than 64 bits. A list keeps
such numbers as bytes (:class:`Wide`). An array has a row of *limbs* of 64 bits for each, the lowest
first: t = low + 2^32 high, and so on. Rows are added limb by limb and without a carry, as there is
room for 2^31 sums; only what is compared or kept has to carry. To numpy a row is one element of
bytes, which is copied as fast as a number.
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
"""Times: numbers of 64 bits, of Python, or rows of limbs."""
LIMB = 32
"""Bits of every limb but the highest, which takes a sign and what is left."""
_LOW = (1 << LIMB) - 1


def per_unit(times: Iterable[Time]) -> int:
    """The least number of ticks in a unit of time that makes all these times whole numbers."""
    return lcm(*{time.denominator for time in times if isinstance(time, Fraction)})


def whole(time: Time, ticks: int) -> int:
    """A time as a number of ticks, with `ticks` in a unit of time; it must be whole."""
    number = plain(time * ticks)
    assert isinstance(number, int)
    return number


def width(largest: int) -> int:
    """How many limbs a number up to `largest` takes; 1 if it is one of 64 bits."""
    bits = largest.bit_length()
    return 1 if bits < 64 else 1 + -(-(bits - 62) // LIMB)


class Wide:
    """A list of whole numbers of more than 64 bits, packed into equally many bytes each: 4 for a
    limb, 8 for the highest."""

    def __init__(self, width: int, numbers: Iterable[int] = ()) -> None:
        self.width = width
        self._size = 4 * width + 4
        self._bytes = bytearray()
        for number in numbers:
            self.append(number)

    @classmethod
    def of(cls, rows: Numbers) -> "Wide":
        """An array of rows as a list."""
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
        """The numbers as an array."""
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
    """The limbs, those of a row beside each other; the bits of a number of 64."""
    return rows.view(np.int64).reshape(len(rows), rows.itemsize // 8)


def signs(numbers: Numbers) -> Numbers:
    """Whole numbers that are negative where these are: their last 8 bytes, in place."""
    return _limbs(numbers)[:, -1]


def add(first: Numbers, second: Numbers) -> Numbers:
    """First and second, element by element."""
    if first.dtype.kind != "V":
        return first + second
    return (first.view(np.int64) + second.view(np.int64)).view(first.dtype)


def later(first: Numbers, second: Numbers) -> Numbers:
    """The greater of each two."""
    if first.dtype.kind != "V":
        return np.maximum(first, second)
    over = _high(first.view(np.int64) - second.view(np.int64), first.itemsize // 8)
    return np.where(over < 0, second, first)


def _high(limbs: Numbers, width: int) -> Numbers:
    """Numbers without their lower limbs, rounded down: negative where the number is."""
    high = limbs[::width]
    for place in range(1, width):
        high = limbs[place::width] + (high >> LIMB)
    return high


def differences(first: Numbers, second: Numbers) -> Numbers:
    """First less second, element by element: numbers of 64 bits, or of Python if these do not
    suffice."""
    if first.dtype.kind != "V":
        return first - second
    result = first.view(np.int64) - second.view(np.int64)
    high = _high(result, first.itemsize // 8)
    if first.itemsize > 16 or (np.abs(high) >> 62 - LIMB).any():
        return np.array(unpacked(result.view(first.dtype)), object)
    return (high << LIMB) + (result[::2] & _LOW)


def total(times: "Sequence[Time] | Wide | Numbers") -> Time:
    """The sum of times. It may need more bits than any of them."""
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
    """An array of numbers or rows as Python numbers."""
    return [*Wide.of(numbers)] if numbers.dtype.kind == "V" else numbers.tolist()


def listed(numbers: Numbers) -> list[Time]:
    """An array of numbers or rows as a list, packed where 64 bits are enough."""
    return unpacked(numbers) if numbers.dtype.kind == "V" else kept(numbers)


def kept(numbers: Numbers) -> list[Time]:
    """An array of numbers or rows as a packed list."""
    if numbers.dtype.kind == "V":
        return cast("list[Time]", Wide.of(numbers))
    return cast("list[Time]", array("q" if numbers.dtype.kind == "i" else "d", numbers.tobytes()))


def room(value: Time, count: int, largest: Time) -> list[Time]:
    """A list with `value` `count` times. It takes floats if `largest` is one, else whole numbers up
    to `largest`, and is packed where 64 bits are enough."""
    if isinstance(largest, float):
        return cast("list[Time]", array("d", [float(value)]) * count)
    numbers = [int(value)]
    narrow = width(int(largest)) == 1
    return cast("list[Time]", (array("q", numbers) if narrow else numbers) * count)


class Scaled(Sequence[Time]):
    """Ticks read as times."""

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
    """The time of a number of ticks."""
    return ticks if per_unit == 1 else plain(Fraction(ticks) / per_unit)
