"""The time that a pipeline operation takes on a slice of a sequence, as it is modelled.

By FLOPs alone all cuts of a sequence cost the same in total, and more slices are always better.
On a machine an operation takes a while however short its slice is (kernels are launched, few rows
do not fill a device), and attention has a speed of its own. TeraPipe (2102.07988) measures both;
here they are two numbers, so that times of a few slices tell those of all:

    time = overhead x P + the slice's linear parts + attention x its scores

in FLOPs, P being those of a position that attends to itself alone. ``train.py --time-slices``
measures the two (:mod:`megapipe.train.slice_times`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

CausalFlops = Callable[[int], int]
"""FLOPs of one layer's forward on the first so many tokens of a sequence."""


@dataclass(frozen=True)
class SliceCost:
    """Time of an operation by the length of its slice, in whole numbers of a unit of its own; the
    same for all kinds of operations and for all stages, up to a factor."""

    flops: CausalFlops
    overhead: Fraction = Fraction(0)
    """Time of an operation besides its slice's FLOPs, in positions that attend to themselves."""
    attention: Fraction = Fraction(1)
    """Time per FLOP of the scores between a position and those before it; that of other FLOPs is
    1."""

    def first(self, length: int) -> int:
        """Time of the first `length` positions of a sequence, without the overhead."""
        alone = length * self.flops(1)
        scores = self.flops(length) - alone
        return self._times(1) * alone + self._times(self.attention) * scores

    def __call__(self, length: int, before: int) -> int:
        """Time of a slice of `length` positions that has `before` positions before it."""
        overhead = self._times(self.overhead) * self.flops(1)
        return overhead + self.first(before + length) - self.first(before)

    def _times(self, factor: Fraction | int) -> int:
        """`factor` in a unit of time in which `overhead` and `attention` are whole numbers."""
        unit = lcm(self.overhead.denominator, self.attention.denominator)
        return factor.numerator * (unit // factor.denominator)

    def shares(self, lengths: Sequence[int]) -> tuple[Fraction, ...]:
        """Time of each slice as a share of the operation on the whole sequence, for `Cost.slices`;
        with an overhead the shares add up to more than 1."""
        whole = self(sum(lengths), 0)
        starts = accumulate(lengths, initial=0)
        return tuple(
            Fraction(self(length, start), whole)
            for length, start in zip(lengths, starts, strict=False)
        )
