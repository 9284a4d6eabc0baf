"""Execution of all ranks' lists in rounds: in a round, every ready rank runs one operation.

A Python loop takes about 1 microsecond per operation. A round takes about 20 microseconds of array
operations, but runs one operation on every rank that is ready. Rounds are faster for millions of
operations on a few dozen ranks or more. If most ranks wait for each other, the loop is faster.
"""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megapipe.schedule.dependencies import LOW, WORK_ITEM_MASK, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED

Ints = NDArray[np.integer]

RANKS, WIDTH = 32, 12
"""Minimum number of ranks, and minimum mean of operations per round; below, a loop is faster."""
FILL = 64
"""Number of rounds that do not count for the mean, since a pipeline fills from one rank."""


class Round(NamedTuple):
    """Operations of one round. Each array has one element per rank that runs an operation."""

    ranks: Ints
    indices: Ints
    """Indices of the operations in the concatenated lists."""
    needs: Ints
    """Numbers of the results that operations need (:mod:`megapipe.schedule.dependencies`)."""


class Wavefront:
    """The concatenated lists of all ranks, and how many operations each rank has run. Operations
    must have stages and micro-batches in range, and must not be joined."""

    def __init__(self, dependencies: Dependencies, lists: Sequence["array[int]"]) -> None:
        self._first: Ints = np.cumsum([0, *map(len, lists)])
        self._next: Ints = self._first[:-1].copy()
        operations = int(self._first[-1])
        self.low: Ints = np.empty(operations, np.int32)
        """Low 20 bits of each operation's code (kind and node), an index into tables of times."""
        self.need: Ints = np.empty(operations, np.int32)
        self.make: Ints = np.empty(operations, np.int32)
        """Numbers of the results that each operation needs (`need`) and makes (`make`)."""
        need, make = (np.array(base, np.int32) for base in dependencies.base)
        for first, listed in zip(self._next, lists, strict=True):
            codes = np.array(listed, np.int64)
            here = slice(first, first + len(codes))
            low, items = codes & LOW, codes >> WORK_ITEM_SHIFT & WORK_ITEM_MASK
            self.low[here], self.need[here], self.make[here] = (
                low,
                need[low] + items,
                make[low] + items,
            )

    @staticmethod
    def suits(dependencies: Dependencies, lists: Sequence["array[int]"]) -> bool:
        """Whether these lists can run in rounds (no joined operations, no spanning stages, result
        numbers of at most 32 bits) and have enough ranks to be faster than in a loop."""
        if len(lists) < RANKS or dependencies.slots > 1 << 31 or dependencies.together:
            return False
        return all(np.array(listed).max(initial=0) < JOINED for listed in lists)

    def done(self, rank: int) -> int:
        """Return how many operations of a rank have run."""
        return int(self._next[rank] - self._first[rank])

    @property
    def left(self) -> bool:
        """Whether any rank has operations left to run."""
        return bool((self._next < self._first[1:]).any())

    @property
    def ran(self) -> list[slice]:
        """Range of the operations that have run, per rank, as indices of the concatenated lists."""
        return [slice(a, b) for a, b in zip(self._first, self._next, strict=False)]

    def rounds(self, made: NDArray[Any]) -> Iterator[Round]:
        """Yield rounds until all operations have run, no rank can continue, or rounds have so few
        operations that a loop is faster.

        Args:
            made: a value per result number, negative until the result exists. After each round
                the caller must set the values of the round's results (:attr:`make`).
        """
        following, stops = self._next, self._first[1:]
        going = np.flatnonzero(following < stops)
        rounds = ran = 0
        while len(going) and ran >= WIDTH * (rounds - FILL):
            indices = following[going]
            needs = self.need[indices]
            ready = made[needs] >= 0
            ranks = going
            if not ready.all():
                ranks, indices, needs = going[ready], indices[ready], needs[ready]
            if not len(ranks):
                return
            yield Round(ranks, indices, needs)
            following[ranks] = indices + 1
            if (following[ranks] == stops[ranks]).any():
                going = going[following[going] < stops[going]]
            rounds += 1
            ran += len(ranks)
