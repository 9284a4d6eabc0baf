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
_EARLY = 8
"""Samples before its own that a lane begins at, for each source."""
_COLUMNS = 64
"""Samples of each lane that are kept before they are written together."""
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
        these 10 bytes of a sample some tens of MiB are held.

    Raises:
        ConfigError: a weight is not positive, or there are too many.
    """
    shares = np.array(weights, np.float64)
    if not np.all(shares > 0):
        raise ConfigError(f"data.mixture: weights {shares.tolist()}: expected positive numbers")
    return _Lanes(shares, size).index()


class _Lanes:
    """A blend of n sources, divided into lanes of equal numbers of samples.

    Its states are the samples taken from each source, [n, lanes], as floats like in the rule.
    """

    def __init__(self, shares: Floats, size: int) -> None:
        if not 0 < len(shares) <= MOST_SOURCES:
            raise ConfigError(f"a blend of {len(shares)} sources: expected 1 to {MOST_SOURCES}")
        self.shares = shares[:, None]
        self.size = size
        most = min(_LANES, max(_NUMBERS // len(shares), 1))
        self.lanes = min(most, max(size // _SHORTEST, 1))
        self.length = -(-size // self.lanes)
        self.early = min(self.length, _EARLY * len(shares))

    def index(self) -> Index:
        """The sources and numbers of all samples."""
        shape = self.lanes, self.length
        found = np.empty(shape, np.int16), np.empty(shape, np.int64)
        first = np.arange(self.lanes, dtype=np.int64) * self.length
        start = np.zeros((len(self.shares), self.lanes))
        later = first[1:] - self.early
        start[:, 1:] = self.walk(later, self.guess(later), self.early)
        end = self.walk(first, start, self.length, found, np.arange(self.lanes))
        while len(wrong := 1 + np.flatnonzero((start[:, 1:] != end[:, :-1]).any(0))):
            start[:, wrong] = end[:, wrong - 1]
            end[:, wrong] = self.walk(first[wrong], start[:, wrong], self.length, found, wrong)
        return found[0].reshape(-1)[: self.size], found[1].reshape(-1)[: self.size]

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
        start: Floats,
        steps: int,
        found: Index | None = None,
        rows: npt.NDArray[np.int64] | None = None,
    ) -> Floats:
        """The states `steps` samples after the samples `first`, from the states `start` before
        these. What is taken on the way is written into `rows` of `found`."""
        lanes = len(first)
        state, lane = start.copy(), np.arange(lanes)
        behind, most = np.empty_like(state), np.empty(lanes)
        is_most = np.empty(state.shape, np.bool_)
        kept = np.empty((_COLUMNS, lanes), np.int16), np.empty((_COLUMNS, lanes), np.int64)
        sample = first.astype(np.float64)
        for step in range(steps):
            np.multiply(self.shares, np.maximum(sample, 1.0), out=behind)
            behind -= state
            behind.max(0, out=most)
            np.equal(behind, most, out=is_most)
            source = is_most.argmax(0)  # the first of equal ones
            number = state[source, lane]
            state[source, lane] = number + 1.0
            sample += 1.0
            if found is None:
                continue
            column = step % _COLUMNS
            kept[0][column], kept[1][column] = source, number
            if column == _COLUMNS - 1 or step == steps - 1:
                some = slice(step - column, step + 1)
                found[0][rows, some] = kept[0][: column + 1].T
                found[1][rows, some] = kept[1][: column + 1].T
        return state
