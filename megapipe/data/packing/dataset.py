"""Samples that consist of packed documents."""

from __future__ import annotations

import bisect
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.dataset import Sample
from megapipe.data.packing.index import Packing
from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError


class PackedDataset:
    """Samples that consist of pieces of documents one after the other, then padding.

    In a piece of n positions each token has the next one as its label, so every token of a document
    except its first is a label exactly once. Padding is a document of its own.

    Args:
        file: the documents.
        packing: the pieces of each sample.
        sequence_length: L.
        padding: the token id that fills up a sample; it is not a label.
    """

    def __init__(
        self, file: TokenFile, packing: Packing, sequence_length: int, padding: int
    ) -> None:
        self.file = file
        self.packing = packing
        self.sequence_length = sequence_length
        self.padding = padding

    def __len__(self) -> int:
        return len(self.packing.samples) - 1

    @property
    def padded(self) -> float:
        """Fraction of all positions that are padding."""
        filled = sum(int(some.sum(dtype=np.int64)) for some in self.packing.lengths.parts())
        return 1 - filled / (len(self) * self.sequence_length)

    def labelled(self, index: int) -> Sample:
        """Return sample `index`. Raises IndexError unless it is in 0 .. len-1."""
        pieces = self.pieces(index)
        tokens, labels = (
            np.full(self.sequence_length, self.padding, dtype=np.int64) for _ in range(2)
        )
        documents = np.full(self.sequence_length, len(pieces), dtype=np.int64)
        at = 0
        for number, piece in enumerate(pieces):
            here = slice(at, at + len(piece) - 1)
            tokens[here], labels[here], documents[here] = piece[:-1], piece[1:], number
            at = here.stop
        mask = np.arange(self.sequence_length) < at
        return Sample(tokens, labels, mask, documents)

    def pieces(self, index: int) -> list[npt.NDArray[Any]]:
        """Return the tokens of each piece of a sample. A piece of n positions has n+1 tokens, as
        the last position needs a label."""
        starts, lengths = self._starts_and_lengths(index)
        counts = [length + 1 for length in lengths]
        tokens = self.file.read_runs(starts, counts)
        stops = itertools.accumulate(counts)
        return [tokens[stop - n : stop] for stop, n in zip(stops, counts, strict=True)]

    def describe_position(self, index: int, at: int, *, label: bool) -> str:
        starts, lengths = self._starts_and_lengths(index)
        ends = np.cumsum(lengths).tolist()
        piece = bisect.bisect_right(ends, at)
        if piece == len(starts):
            return f"padding of sample {index} of {self.file.path}"
        position = starts[piece] + at - (ends[piece] - lengths[piece]) + label
        return f"position {position} of {self.file.path}"

    def _starts_and_lengths(self, index: int) -> tuple[list[int], list[int]]:
        """Return, for each piece of a sample, the position of its first token in the file, and its
        number of positions."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, last = self.packing.samples.rows(index, index + 2).tolist()
        starts: list[int] = self.packing.starts.rows(first, last).tolist()
        lengths: list[int] = self.packing.lengths.rows(first, last).tolist()
        if min(lengths, default=0) < 1 or sum(lengths) > self.sequence_length:
            folder = self.packing.samples.file.path.parent
            raise DataError(
                f"{folder} is damaged: sample {index} has pieces of {sum(lengths)} positions "
                "in total: remove it and it is rebuilt"
            )
        return starts, lengths
