"""The shuffled orders of documents and of samples.

Both come from one legacy generator of NumPy, MT19937 with a seed, whose shuffles are drawn one
after
the other: first those of the documents, then those of the samples.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.indices.counts import EpochCounts
from megapipe.errors import ConfigError, DataError

_MOST_SEQUENCES = 2**31


def generator(seed: int) -> np.random.RandomState:
    """The source of both orders. Raises ConfigError for a seed that it does not take."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed {seed}: expected 0 to {2**32 - 1}")
    return np.random.RandomState(seed)


def document_index(
    sequences: range, counts: EpochCounts, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    """The sequences of all epochs in the order in which they are read [epochs * sequences].

    A sequence is what Megatron-LM calls a document here: all that an index gives a length to.
    Raises DataError if there are more than int32 can number.
    """
    if sequences.stop > _MOST_SEQUENCES:
        raise DataError(f"{sequences.stop} sequences, but indices number at most {_MOST_SEQUENCES}")
    one = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    found = np.tile(one, counts.epochs)
    together = len(found) if counts.apart is None else len(found) - len(one)
    _shuffle(found, together, random)
    return found


def shuffle_index(counts: EpochCounts, random: np.random.RandomState) -> npt.NDArray[Any]:
    """The number of each sample in reading order, in the order of training [samples]: uint32, or
    int64 if there are 2^32 - 2 or more."""
    small = counts.samples < np.iinfo(np.uint32).max - 1
    found = np.arange(counts.samples, dtype=np.uint32 if small else np.int64)
    _shuffle(found, counts.samples if counts.apart is None else counts.apart, random)
    return found


def _shuffle(values: npt.NDArray[Any], cut: int, random: np.random.RandomState) -> None:
    """Shuffle what is before `cut`, then, if there is anything, what is after it."""
    random.shuffle(values[:cut])
    if cut < len(values):
        random.shuffle(values[cut:])
