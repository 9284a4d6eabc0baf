"""Which source each sample of a blend comes from.

Sample k is taken from the source that is furthest behind its share: the largest w_i * max(k, 1)
minus the samples taken from source i so far, the first of equal ones. That is a loop of which each
turn needs the one before. Here many places of the blend are worked on at once, as lanes of arrays:
a lane has a run of consecutive samples and begins at a guess of what has been taken before. The
rule makes good for a wrong guess: two states that differ come closer where they do not take the
same source, and soon are one. So a lane begins some samples early, and in the end its first state
is compared with the last state of the lane before. Lanes for which they differ are done again from
that last state, until none is left. Lane 0 begins at the true state, so all of them do then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megapipe.errors import ConfigError

_LANES = 4096
_SHORTEST = 256
"""Lanes at most, and the samples that a lane has at least."""
_NUMBERS = 2**18
"""Sources times lanes at most, unless a single lane has more."""
_COLUMNS = 64
"""Samples of each lane that are kept before they are written together."""
_AT_ONCE = 2**20
MOST_SOURCES = 2**15 - 2

Floats = npt.NDArray[np.float64]
Index = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]


def blend_index(weights: Sequence[float] | Floats, size: int) -> Index:
    """The blend index of Megatron-LM for sources of given shares.

    Args:
        weights: the share of each source, positive; their sum is 1
            (see :func:`~megapipe.data.indices.shares.normalised`).
        size: samples of the blend.

    Returns:
        The source of each sample [size] and its number among those of that source [size]. Beside
        them about 8 MiB are held, and 18 bytes for each of a million samples.

    Raises:
        ConfigError: a weight is not positive, or there are too many.
    """
    shares = np.array(weights, np.float64)
    if not np.all(shares > 0):
        raise ConfigError(f"weights of a blend {shares.tolist()}: expected positive numbers")
    return _numbered(_Lanes(shares, size, None).sources(), len(shares))


def exhaustive_blend_index(sizes: Sequence[int]) -> Index:
    """The blend index of Megatron-LM that takes every sample of every source once.

    Args:
        sizes: samples of each source, positive.

    Returns:
        As :func:`blend_index`, for the sum of the sizes.

    Raises:
        ConfigError: a size is not positive, or there are too many.
    """
    limits = np.array(sizes, np.int64)
    if not np.all(limits > 0):
        raise ConfigError(f"sizes of a blend {limits.tolist()}: expected positive numbers")
    total = int(limits.sum())
    shares = limits / float(total)
    return _numbered(_Lanes(shares, total, limits.astype(np.float64)).sources(), len(limits))


class _Lanes:
    """A blend of n sources, divided into lanes of equal numbers of samples.

    Its states are the samples taken from each source, [n, lanes], as floats like in the rule.
    """

    def __init__(self, shares: Floats, size: int, limits: Floats | None) -> None:
        if not 0 < len(shares) <= MOST_SOURCES:
            raise ConfigError(f"a blend of {len(shares)} sources: expected 1 to {MOST_SOURCES}")
        self.shares = shares[:, None]
        self.size = size
        self.limits = None if limits is None else limits[:, None]
        most = min(_LANES, max(_NUMBERS // len(shares), 1))
        self.lanes = min(most, max(size // _SHORTEST, 1))
        self.length = -(-size // self.lanes)
        # a source is taken once in 1 / share samples, and a guess of it is right after a few times
        self.early = min(self.length, int(np.ceil(4 / shares.min())))

    def sources(self) -> npt.NDArray[np.int16]:
        """The source of each sample [size]."""
        found = np.empty((self.lanes, self.length), np.int16)
        first = np.arange(self.lanes, dtype=np.int64) * self.length
        start = np.zeros((len(self.shares), self.lanes))
        later = first[1:] - self.early
        start[:, 1:] = self.walk(later, self.guess(later), self.early)
        end = self.walk(first, start, self.length, found, np.arange(self.lanes))
        while len(wrong := 1 + np.flatnonzero((start[:, 1:] != end[:, :-1]).any(0))):
            start[:, wrong] = end[:, wrong - 1]
            end[:, wrong] = self.walk(first[wrong], start[:, wrong], self.length, found, wrong)
        return found.reshape(-1)[: self.size]

    def guess(self, first: npt.NDArray[np.int64]) -> Floats:
        """States before the samples `first`: shares of them, rounded so that the sums are right."""
        exact = self.shares * first
        whole = np.floor(exact)
        missing = first - whole.sum(0)
        rank = np.argsort(np.argsort(whole - exact, axis=0, kind="stable"), axis=0, kind="stable")
        return whole + (rank < missing)

    def walk(
        self,
        first: npt.NDArray[np.int64],
        state: Floats,
        steps: int,
        found: npt.NDArray[np.int16] | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> Floats:
        """The states `steps` samples after the samples `first`, from states before these. Sources
        on the way are written into `rows` of `found`."""
        lanes = len(first)
        state = state.copy()
        behind, most = np.empty_like(state), np.empty(lanes)
        is_most = np.empty(state.shape, np.bool_)
        lane = np.arange(lanes)
        kept = np.empty((_COLUMNS, lanes), np.int16)
        for step in range(steps):
            np.multiply(self.shares, np.maximum(first + step, 1), out=behind)
            behind -= state
            if self.limits is not None:
                np.copyto(behind, -np.inf, where=state >= self.limits)
            behind.max(0, out=most)
            np.equal(behind, most, out=is_most)
            taken = is_most.argmax(0)  # the first of equal ones
            state[taken, lane] += 1
            if found is not None:
                column = step % _COLUMNS
                kept[column] = taken
                if column == _COLUMNS - 1 or step == steps - 1:
                    found[rows, step - column : step + 1] = kept[: column + 1].T
        return state


def _numbered(sources: npt.NDArray[np.int16], count: int) -> Index:
    """With the number of each sample among those of its source."""
    numbers = np.empty(len(sources), np.int64)
    before = np.zeros(count, np.int64)
    for first in range(0, len(sources), _AT_ONCE):
        part = sources[first : first + _AT_ONCE]
        by_source = np.argsort(part, kind="stable")
        amounts = np.bincount(part, minlength=count)
        starts = before - (np.cumsum(amounts) - amounts)
        numbers[first : first + len(part)][by_source] = np.arange(len(part)) + starts.repeat(
            amounts
        )
        before += amounts
    return sources, numbers
