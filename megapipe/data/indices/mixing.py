"""A run on several sources in the order of a blend of Megatron-LM's."""

from __future__ import annotations

import numpy as np

from megapipe.data.indices.blend import Index
from megapipe.data.mixture import Draw
from megapipe.data.stored import Array, StoredArray
from megapipe.errors import DataError

_BACK, _MOST_BACK = 2**10, 2**20
"""Samples that are looked at first for the last one of each source, and at most at a time."""


class Blend:
    """Deals the samples of a run to n sources as a blend index says.

    Args:
        index: source [N] and number there [N] of each sample.
        sources: n.
    """

    def __init__(self, index: Index | tuple[StoredArray, StoredArray], sources: int) -> None:
        self._source: Array | StoredArray = index[0]
        self._number: Array | StoredArray = index[1]
        self._sources = sources

    def __len__(self) -> int:
        return len(self._source)

    def __call__(self, sample: int) -> Draw:
        """Where sample `sample` is from. Raises DataError if the blend has no such sample."""
        if not 0 <= sample < len(self):
            raise self._used_up(len(self))
        return Draw(int(self._source[sample]), int(self._number[sample]))

    def taken(self, samples: int) -> list[int]:
        """Samples of each source [n] among the first `samples`."""
        found = [0] * self._sources
        left, back, stop = set(range(self._sources)), _BACK, min(samples, len(self))
        while left and stop > 0:
            start = max(stop - back, 0)
            some = self._source[start:stop]
            for source in list(left):
                at = np.flatnonzero(some == source)
                if len(at):
                    found[source] = int(self._number[start + at[-1]]) + 1
                    left.remove(source)
            back, stop = min(2 * back, _MOST_BACK), start
        return found

    def check(self, samples: int) -> None:
        """Raise DataError if there are fewer than `samples`."""
        if samples > len(self):
            raise self._used_up(len(self))

    def _used_up(self, samples: int) -> DataError:
        return DataError(
            f"data.mixture: its sources are used up after {samples} samples: expected weights, by "
            "which they are taken more than once, or fewer train.steps"
        )
