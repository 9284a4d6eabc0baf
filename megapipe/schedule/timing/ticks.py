"""Times as whole numbers of ticks.

Fractions are slow and floats round. So exact costs are brought to one denominator: a *tick* is so
short that every time is a whole number of ticks, and what happens to millions of operations is
arithmetic of whole numbers. Decimals of 17 digits make ticks so short that their numbers need more
than 64 bits; :class:`Wide` packs those.
"""

from array import array
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import lcm
from typing import cast, overload

from megapipe.schedule.cost import Time, plain

_LARGEST = (1 << 63) - 1


def per_unit(times: Iterable[Time]) -> int:
    """The least number of ticks in a unit of time that makes all these times whole numbers."""
    return lcm(*{time.denominator for time in times if isinstance(time, Fraction)})


def whole(time: Time, ticks: int) -> int:
    """A time as a number of ticks, with `ticks` in a unit of time; it must be whole."""
    number = plain(time * ticks)
    assert isinstance(number, int)
    return number


class Wide:
    """A list of whole numbers of any size, packed into equally many bytes each."""

    def __init__(self, width: int, numbers: Iterable[int] = ()) -> None:
        self.width = width
        self._bytes = bytearray()
        self.extend(numbers)

    def __len__(self) -> int:
        return len(self._bytes) // self.width

    def __getitem__(self, index: int) -> int:
        if index < 0:
            index += len(self)
        here = index * self.width
        packed = self._bytes[here : here + self.width]
        if not packed:
            raise IndexError(index)
        return int.from_bytes(packed, "little", signed=True)

    def __setitem__(self, index: int, number: int) -> None:
        here = index * self.width
        self._bytes[here : here + self.width] = number.to_bytes(self.width, "little", signed=True)

    def append(self, number: int) -> None:
        self._bytes += number.to_bytes(self.width, "little", signed=True)

    def extend(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.append(number)

    def __mul__(self, count: int) -> "Wide":
        result = Wide(self.width)
        result._bytes = self._bytes * count
        return result


def room(value: Time, count: int, largest: Time) -> list[Time]:
    """A packed array, used as a list, with `value` `count` times. It takes floats if `largest` is
    one, else whole numbers up to `largest`, however large that is."""
    if isinstance(largest, float):
        return cast("list[Time]", array("d", [float(value)]) * count)
    number = int(value)
    if largest <= _LARGEST:
        return cast("list[Time]", array("q", [number]) * count)
    width = int(largest).bit_length() // 8 + 1  # with a bit for the sign
    return cast("list[Time]", Wide(width, [number]) * count)


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
