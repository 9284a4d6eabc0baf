"""The source of each sample of a run, by the index of a Megatron-LM blend."""

from __future__ import annotations

import numpy as np

from megapipe.data.indices.blend import Index
from megapipe.data.mixture import Draw
from megapipe.data.stored import Array, StoredArray
from megapipe.errors import DataError

_BACK, _MOST_BACK = 2**10, 2**20
"""Number of samples that the backward search for each source's last sample reads at first, and the
maximum that it reads at a time."""


class Blend:
    """Assigns the samples of a run to n sources by a blend index.

    Args:
        index: for each sample its source [N] and its number in that source [N].
        sources: number of sources, n.
    """

    def __init__(self, index: Index | tuple[StoredArray, StoredArray], sources: int) -> None:
        self._source: Array | StoredArray = index[0]
        self._number: Array | StoredArray = index[1]
        self._sources = sources

    def __len__(self) -> int:
        return len(self._source)

    def __call__(self, sample: int) -> Draw:
        """Return source and draw of sample number `sample` of the run. Raises DataError if the
        blend has fewer samples."""
        if not 0 <= sample < len(self):
            raise self._used_up(len(self))
        return Draw(int(self._source[sample]), int(self._number[sample]))

    def taken(self, samples: int) -> list[int]:
        """Return how many of the first `samples` samples come from each source [n]."""
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
        """Raise DataError if the blend has fewer than `samples` samples."""
        if samples > len(self):
            raise self._used_up(len(self))

    def _used_up(self, samples: int) -> DataError:
        return DataError(
            f"data.mixture: its sources are used up after {samples} samples: expected "
            "weights, with which sources repeat, or fewer train.steps"
        )
