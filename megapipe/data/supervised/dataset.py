"""Samples of packed examples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megapipe.data.dataset import Sample, Stream
from megapipe.data.packing import PackedDataset, Packing


class ExampleDataset(PackedDataset):
    """Packed examples. Only tokens of the text that the model should write are labels.

    Args:
        vocab_size: V. Token i is stored as i if it is a label, and as V + i if not.
    """

    def __init__(
        self, stream: Stream, packing: Packing, sequence_length: int, padding: int, vocab_size: int
    ) -> None:
        super().__init__(stream.file, packing, sequence_length, padding)
        self.vocab_size = vocab_size

    def labelled(self, index: int) -> Sample:
        stored = super().labelled(index)
        counts = stored.labels < self.vocab_size
        return stored._replace(
            tokens=self._ids(stored.tokens),
            labels=self._ids(stored.labels),
            mask=stored.mask & counts,
        )

    def _ids(self, stored: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.where(stored < self.vocab_size, stored, stored - self.vocab_size)


def count_too_long(stream: Stream, length: int) -> int:
    """Count the examples of a stream that are longer than a sample of `length` positions."""
    sizes = stream.file.lengths.parts(stream.sequences.start, stream.sequences.stop)
    return sum(int((some > length + 1).sum()) for some in sizes)
