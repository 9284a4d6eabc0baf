"""The source of each sample of a Megatron-LM blend, computed for many samples at once.

Sample k is taken from the source that is furthest behind its share: the source i with the largest
w_i * max(k, 1) minus the samples taken from it so far; ties go to the lower index. Such a rule
needs a loop over samples. To vectorize it, the samples are divided into lanes, which are ranges of
consecutive samples. All lanes advance together, as elements of arrays. The state at a sample is the
number of earlier samples of each source; a lane begins with a guess of its state. The rule corrects
a wrong guess: two different states come closer where they take different sources, and soon are
equal. So a lane begins some samples before its range. Then the state at its first sample is
compared with the last state of the previous lane. A lane that differs is recomputed from that last
state, until no lane differs. Lane 0 begins with the true state, so in the end every lane is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megapipe.errors import ConfigError

_LANES, _SHORTEST = 4096, 256
"""Maximum number of lanes, and minimum number of samples per lane."""
_NUMBERS = 2**18
"""Maximum product of sources and lanes, unless a single lane exceeds it."""
_EARLY = 8
"""Number of samples by which a lane begins before its range, per source of the blend."""
_COLUMNS = 64
"""Number of samples of each lane that are buffered before they are written together."""
MOST_SOURCES = 2**15 - 2

Floats = npt.NDArray[np.float64]
Index = tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]


def blend_index(weights: Sequence[float] | Floats, size: int) -> Index:
    """Return the blend index of Megatron-LM for sources with the given shares.

    Args:
        weights: the share of each source, positive; the sum is 1 (see
            :func:`~megapipe.data.indices.shares.normalised`).
        size: number of samples of the blend.

    Returns:
        The source of each sample [size], and the sample's number in that source [size]. The arrays
            take 10 bytes per sample, and the computation some tens of MiB more.

    Raises:
        ConfigError: a weight is not positive, or there are too many sources.
    """
    shares = np.array(weights, np.float64)
    if not np.all(shares > 0):
        raise ConfigError(f"data.mixture: weights {shares.tolist()}: expected positive numbers")
    return _Lanes(shares, size).index()


class _Lanes:
    """A blend of n sources, divided into lanes of equally many samples.

    A state is the number of samples taken from each source, [n, lanes], as floats.
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
        """Return the source of every sample, and the sample's number in that source."""
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
        """Return a guess of the states before the samples `first` [lanes]. A source is assumed to
        have its share of the earlier samples, rounded so that the sum over sources is exact."""
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
        """Take `steps` samples in each lane, from the sample `first` on, where the state is
        `start`. Return the states afterwards. With `found`, write the source of each sample and its
        number in the source into the rows `rows` of `found`."""
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
            source = is_most.argmax(0)  # of equal ones, the first
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
