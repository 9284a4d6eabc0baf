"""Samples of a token file in the order of Megatron-LM's indices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megapipe.data.dataset import Sample
from megapipe.data.indices.indices import Indices
from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError


class IndexedDataset:
    """Samples of Megatron-LM's GPTDataset: windows of documents in a shuffled order.

    The documents in reading order form one stream, which is cut into samples of L inputs and their
    labels. Sample i is the cut whose number the shuffle index gives for i. The indices contain the
    order of the samples, so :mod:`megapipe.data.order` is not used. A short last sample stays
    short; Megatron-LM fills it up with masked tokens.

    Args:
        file: the tokens.
        indices: the file's indices, see :func:`~megapipe.data.indices.indices.open_indices`.
        sequence_length: L, for which the indices were made.
    """

    def __init__(self, file: TokenFile, indices: Indices, sequence_length: int) -> None:
        self.file = file
        self.indices = indices
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def labelled(self, index: int) -> Sample:
        """Return sample `index`, in 0 .. len-1.

        Raises:
            IndexError: there is no such sample.
            DataError: the sample is outside the token file, so the file's index is damaged.
        """
        return Sample.of_window(self._window(index), self.sequence_length)

    def describe_position(self, index: int, at: int, *, label: bool) -> str:
        """Describe, for an error, where the input at position `at` of sample `index` comes from, or
        with `label` the label at that position."""
        left = at + label
        for start, tokens in zip(*self._parts(index), strict=True):
            if left < tokens:
                return f"position {start + left} of {self.file.path}"
            left -= tokens
        raise IndexError(f"token {at} behind the end of sample {index}")

    def _window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the tokens of a sample and the next token [L + 1]; the last may be shorter."""
        return self.file.read_runs(*self._parts(index)).astype(np.int64)

    def _parts(self, index: int) -> tuple[list[int], list[int]]:
        """Return the ranges of tokens in the file that make up a sample: starts and lengths."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        row = int(self.indices.shuffle[index])
        (first, begin), (last, end) = self.indices.samples.rows(row, row + 2).tolist()
        if not 0 <= first <= last < len(self.indices.documents):
            raise DataError(
                f"{self.indices.samples.file.path} is damaged: it has no place for sample {index}"
            )
        starts, counts = self.file.spans(self.indices.documents.rows(first, last + 1))
        rest = counts[-1] - (end + 1)
        counts[-1] = end + 1
        starts[0] += begin
        counts[0] -= begin
        tokens = sum(counts)
        if (
            rest < 0
            or min(counts) < 0
            or tokens > self.sequence_length + 1
            or (tokens <= self.sequence_length and row != len(self) - 1)
        ):
            raise DataError(
                f"{self.file.index_path} and {self.indices.samples.file.path} do not agree about "
                f"sample {index}: one of them is damaged"
            )
        return starts, counts
