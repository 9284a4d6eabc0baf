"""Samples by the indices of a token file."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megapipe.data.dataset import Sample
from megapipe.data.indices.indices import Indices
from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError


class IndexedDataset:
    """The samples of Megatron-LM's GPTDataset: windows of documents in a shuffled order.

    Sample i is L inputs and their labels, cut from the documents in reading order as if they were
    one stream; the number i is mapped by the shuffle index. The order of the samples is in the
    indices, so it needs none of :mod:`megapipe.data.order`. A last sample that is short stays so,
    where Megatron-LM fills it up with masked tokens.

    Args:
        file: the tokens.
        indices: of that file, see :func:`~megapipe.data.indices.indices.open_indices`.
        sequence_length: L, as the indices were made for.
    """

    def __init__(self, file: TokenFile, indices: Indices, sequence_length: int) -> None:
        self.file = file
        self.indices = indices
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.indices.shuffle)

    def labelled(self, index: int) -> Sample:
        """Sample `index`, of 0 .. len-1.

        Raises:
            IndexError: there is no such sample.
            DataError: it lies outside the token file, whose index is damaged then.
        """
        return Sample.of_window(self._window(index), self.sequence_length)

    def place(self, index: int, at: int, *, label: bool) -> str:
        """The place of token or label `at` of a sample, for errors."""
        left = at + label
        for start, tokens in zip(*self._parts(index), strict=True):
            if left < tokens:
                return f"position {start + left} of {self.file.path}"
            left -= tokens
        raise IndexError(f"token {at} behind the end of sample {index}")

    def _window(self, index: int) -> npt.NDArray[np.int64]:
        """The tokens of a sample and the one that follows [L + 1], or fewer in the last one."""
        return self.file.read_runs(*self._parts(index)).astype(np.int64)

    def _parts(self, index: int) -> tuple[list[int], list[int]]:
        """The tokens of the file that the runs of a sample begin with, and the tokens of each."""
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
