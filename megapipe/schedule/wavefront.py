"""Many ranks at once: rounds in which every rank that can runs its next operation.

A loop over operations takes a microsecond for each. A round takes some twenty, but runs one
operation on every rank that is ready: with a few dozen ranks or more that is faster for millions of
operations. A schedule whose ranks mostly wait for each other is left to the loop.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapipe.schedule.dependencies import LOW, PIECE_SHIFT, PIECES, Dependencies
from megapipe.schedule.ir import JOINED

Ints = NDArray[np.integer]

RANKS, WIDTH = 32, 12
"""With fewer ranks, or fewer operations per round, a loop is faster."""
FILL = 64
"""Rounds that may be narrower, since a pipeline begins with one rank."""


class Round(NamedTuple):
    """Operations that run now, an element for each rank that runs something."""

    ranks: Ints
    places: Ints
    """Where the operations are in the lists laid end to end."""
    needs: Ints
    """The slots that they need."""


class Wavefront:
    """The lists of all ranks, laid end to end, and how far each rank has come. Operations must be
    in range, and none joined."""

    def __init__(self, dependencies: Dependencies, lists: Sequence["array[int]"]) -> None:
        self._first: Ints = np.cumsum([0, *map(len, lists)])
        self._next: Ints = self._first[:-1].copy()
        places = int(self._first[-1])
        self.low: Ints = np.empty(places, np.int32)
        """By place: what selects the times of an operation."""
        self.need: Ints = np.empty(places, np.int32)
        self.make: Ints = np.empty(places, np.int32)
        """By place: the slots that an operation needs and fills."""
        need, make = (np.array(base, np.int32) for base in dependencies.base)
        for first, listed in zip(self._next, lists, strict=True):
            codes = np.array(listed, np.int64)
            here = slice(first, first + len(codes))
            low, pieces = codes & LOW, codes >> PIECE_SHIFT & PIECES
            self.low[here], self.need[here], self.make[here] = (
                low,
                need[low] + pieces,
                make[low] + pieces,
            )

    @staticmethod
    def suits(dependencies: Dependencies, lists: Sequence["array[int]"]) -> bool:
        """Whether rounds may be faster than a loop, no operations are joined, and slots are numbers
        of 32 bits."""
        if len(lists) < RANKS or dependencies.slots > 1 << 31:
            return False
        return all(np.array(listed).max(initial=0) < JOINED for listed in lists)

    def done(self, rank: int) -> int:
        """How many operations of a rank have run."""
        return int(self._next[rank] - self._first[rank])

    @property
    def left(self) -> bool:
        """Whether operations are left."""
        return bool((self._next < self._first[1:]).any())

    @property
    def ran(self) -> list[slice]:
        """By rank, the places of its operations that have run."""
        return [slice(a, b) for a, b in zip(self._first, self._next, strict=False)]

    def rounds(self, made: NDArray[Any]) -> Iterator[Round]:
        """The rounds up to the end, to where no rank can go on, or to where rounds are too narrow.

        Args:
            made: by slot, negative until it is filled. The caller fills what each round makes.
        """
        following, stops = self._next, self._first[1:]
        going = np.flatnonzero(following < stops)
        rounds = ran = 0
        while len(going) and ran >= WIDTH * (rounds - FILL):
            places = following[going]
            needs = self.need[places]
            ready = made[needs] >= 0
            ranks = going
            if not ready.all():
                ranks, places, needs = going[ready], places[ready], needs[ready]
            if not len(ranks):
                return
            yield Round(ranks, places, needs)
            following[ranks] = places + 1
            if (following[ranks] == stops[ranks]).any():
                going = going[following[going] < stops[going]]
            rounds += 1
            ran += len(ranks)
