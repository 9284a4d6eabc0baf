"""Samples of fixed length, and how they are cut from a stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError
from megapipe.words import count_noun

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class TooShort(DataError):
    """A corpus, or a part of it, has not enough for one sample.

    Attributes:
        what: the text of the error behind the file, which may be one that the user does not know.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.what = what


class Sample(NamedTuple):
    """Inputs [L] and labels [L] of a sequence of L positions; fewer at the end of a stream."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """The labels that count in the loss."""
    documents: npt.NDArray[np.int64] | None = None
    """Number of the document of each token [L], not decreasing, where several are packed; by
    default a document ends at its end mark."""

    @staticmethod
    def of_window(window: npt.NDArray[np.int64], sequence_length: int) -> Sample:
        """Each token of a window [L+1], or shorter, with the one that follows it as its label."""
        mask = np.ones(len(window) - 1, dtype=np.bool_)
        return Sample(window[:sequence_length], window[1:], mask)


class Dataset(Protocol):
    """Samples by number."""

    sequence_length: int
    """L."""

    def __len__(self) -> int: ...

    def labelled(self, index: int) -> Sample:
        """Sample `index`, of 0 .. len-1."""

    def place(self, index: int, at: int, *, label: bool) -> str:
        """The place of token or label `at` of a sample, for errors."""


@dataclass(frozen=True)
class Stream:
    """Consecutive tokens of a token file: all of it, or the sequences of a split."""

    file: TokenFile
    sequences: range
    """None of them where the tokens are a part of one."""
    positions: range
    """Of the tokens in the file's stream."""

    @staticmethod
    def of(file: TokenFile, sequences: range | None = None) -> Stream:
        """The tokens of sequences, by default all. Raises DataError for a damaged index."""
        sequences = range(len(file.lengths)) if sequences is None else sequences
        first, last = file.starts(np.array([sequences.start, sequences.stop]))
        return Stream(file, sequences, range(int(first), int(last)))


class Corpus(Protocol):
    """A source of samples, as ``data.source`` names one."""

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of what decides its content."""

    @property
    def content(self) -> str:
        """SHA-256, in hex, of what stands for its content, wherever it lies."""

    @property
    def entropy(self) -> float | None:
        """Unigram entropy, in nats per token, where it is known."""

    def part(self, split: Split) -> Stream | Dataset | None:
        """A split: tokens that are still to be cut into samples, or samples; None: it has none.
        Raises DataError if it is damaged."""


class TokenDataset:
    """Cuts the stream of a token file into windows that give each position an input and a label.

    Sample i is tokens i*L .. i*L+L (L+1 of them): neighbours share one token, so every token but
    the first of the stream is the label of exactly one position.

    Args:
        file: the stream.
        sequence_length: L.
        span: positions of the stream that it has; all by default.
        keep_last: whether the tokens that do not fill a last window make a shorter sample (held-out
            text is then scored to its last token) or are left out.

    Raises:
        TooShort: the stream has no sample.
    """

    def __init__(
        self,
        file: TokenFile,
        sequence_length: int,
        span: range | None = None,
        *,
        keep_last: bool = False,
    ) -> None:
        self.file = file
        self.span = range(len(file.tokens)) if span is None else span
        self.sequence_length = sequence_length
        labels = len(self.span) - 1
        self._samples = -(-labels // sequence_length) if keep_last else labels // sequence_length
        if self._samples <= 0:  # -1 of no tokens
            needed = 2 if keep_last else sequence_length + 1
            where = "" if span is None else f" from position {span.start} to {span.stop}"
            raise TooShort(
                file.path,
                f"has {count_noun(labels + 1, 'token')}{where}, but one sample needs {needed} "
                f"(train.sequence_length={sequence_length}): use more text"
                + ("" if keep_last else " or shorter sequences"),
            )

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Window `index` [L+1]; only the last one of `keep_last` may be shorter, but has 2 or more.

        Raises:
            IndexError: index is not in 0 .. len-1.
        """
        if not 0 <= index < self._samples:
            raise IndexError(f"sample {index} of {self._samples}")
        start = self.span.start + index * self.sequence_length
        stop = min(start + self.sequence_length + 1, self.span.stop)
        window: npt.NDArray[Any] = self.file.read(start, stop)
        return window.astype(np.int64)

    def labelled(self, index: int) -> Sample:
        return Sample.of_window(self.sample(index), self.sequence_length)

    def place(self, index: int, at: int, *, label: bool) -> str:
        position = self.span.start + index * self.sequence_length + at + label
        return f"position {position} of {self.file.path}"
