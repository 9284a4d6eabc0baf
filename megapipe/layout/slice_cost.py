"""A model of the time that a pipeline operation takes on a slice of a sequence.

By FLOPs alone all cuts of a sequence cost the same in total, and more slices are always better. In
reality an operation has a minimum time however short its slice is (kernel launches, too few tokens
to fill a device), and attention runs at another speed than linear layers. TeraPipe (2102.07988)
measures both. This model has one number for each effect, so the times of a few slices are enough to
predict all others:

    time = overhead x P + FLOPs of the slice's linear layers + attention x FLOPs of its scores

where P is the FLOPs of a position that attends only to itself. ``train.py --time-slices`` measures
the two numbers (:mod:`megapipe.train.slice_times`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

CausalFlops = Callable[[int], int]
"""Function that returns the FLOPs of a layer's forward on the first n tokens, from n."""


@dataclass(frozen=True)
class SliceCost:
    """Function that returns the time of an operation on a slice, as an integer in an arbitrary
    unit. The ratio of two slices' times holds for every kind of operation and every stage."""

    flops: CausalFlops
    overhead: Fraction = Fraction(0)
    """Fixed time of an operation, in FLOPs of a position that attends only to itself."""
    attention: Fraction = Fraction(1)
    """Time per FLOP of attention to earlier positions; 1: as fast as other FLOPs."""

    def first(self, length: int) -> int:
        """Return the time of the first `length` positions of a sequence, without the overhead."""
        alone = length * self.flops(1)
        scores = self.flops(length) - alone
        return self._times(1) * alone + self._times(self.attention) * scores

    def __call__(self, length: int, before: int) -> int:
        """Return the time of a slice of `length` positions after `before` positions."""
        overhead = self._times(self.overhead) * self.flops(1)
        return overhead + self.first(before + length) - self.first(before)

    def _times(self, factor: Fraction | int) -> int:
        """Return `factor` times the common denominator of `overhead` and `attention`."""
        unit = lcm(self.overhead.denominator, self.attention.denominator)
        return factor.numerator * (unit // factor.denominator)

    def shares(self, lengths: Sequence[int]) -> tuple[Fraction, ...]:
        """Return the time of each slice relative to the uncut sequence, for `Cost.slices`. With an
        overhead the sum is above 1."""
        whole = self(sum(lengths), 0)
        starts = accumulate(lengths, initial=0)
        return tuple(
            Fraction(self(length, start), whole)
            for length, start in zip(lengths, starts, strict=False)
        )
