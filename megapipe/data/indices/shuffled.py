"""The shuffled orders of documents and of samples.

One legacy generator of NumPy, MT19937 with a seed, first shuffles the documents, then the samples.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.indices.counts import EpochCounts
from megapipe.errors import ConfigError, DataError

_MOST_SEQUENCES = 2**31


def generator(seed: int) -> np.random.RandomState:
    """Return the random generator of both orders. Raises ConfigError for a seed out of range."""
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed {seed}: expected 0 to {2**32 - 1}")
    return np.random.RandomState(seed)


def document_index(
    sequences: range, counts: EpochCounts, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
    """Return the sequences of all epochs in reading order [epochs * sequences].

    A sequence is an entry with a length in the token file's index; Megatron-LM calls it a document.
    Raises DataError if int32 cannot number the sequences.
    """
    if sequences.stop > _MOST_SEQUENCES:
        raise DataError(f"{sequences.stop} sequences, but indices number at most {_MOST_SEQUENCES}")
    one = np.arange(sequences.start, sequences.stop, dtype=np.int32)
    found = np.tile(one, counts.epochs)
    together = len(found) if counts.apart is None else len(found) - len(one)
    _shuffle(found, together, random)
    return found


def shuffle_index(counts: EpochCounts, random: np.random.RandomState) -> npt.NDArray[Any]:
    """Return, for each sample in shuffled order, its number in reading order [samples]: uint32, or
    int64 from 2^32 - 2 samples on."""
    small = counts.samples < np.iinfo(np.uint32).max - 1
    found = np.arange(counts.samples, dtype=np.uint32 if small else np.int64)
    _shuffle(found, counts.samples if counts.apart is None else counts.apart, random)
    return found


def _shuffle(values: npt.NDArray[Any], cut: int, random: np.random.RandomState) -> None:
    """Shuffle the values before index `cut` and, separately, the values from `cut` on, if any."""
    random.shuffle(values[:cut])
    if cut < len(values):
        random.shuffle(values[cut:])
