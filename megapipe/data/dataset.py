"""Samples of fixed length, and how samples are cut from a stream of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError
from megapipe.text import count_noun

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class TooShort(DataError):
    """Raised when a corpus, or a split of it, is too short for one sample.

    Attributes:
        what: the error text without the file's path, for a user who does not know the file.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} {what}")
        self.what = what


class Sample(NamedTuple):
    """Inputs [L] and labels [L] of a sequence. At the end of a stream there may be fewer: n labels,
    and n+1 inputs."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """Whether each label counts in the loss, [L]."""
    documents: npt.NDArray[np.int64] | None = None
    """Index of each token's document [L], not decreasing. None unless the sample is packed; without
    these indices, documents are separated by their EOS tokens."""

    @staticmethod
    def of_window(window: npt.NDArray[np.int64], sequence_length: int) -> Sample:
        """Make a sample from up to L+1 consecutive tokens; the label of each is the next one."""
        mask = np.ones(len(window) - 1, dtype=np.bool_)
        return Sample(window[:sequence_length], window[1:], mask)


class Dataset(Protocol):
    """Samples, looked up by index."""

    sequence_length: int
    """Positions of a sample, L."""

    def __len__(self) -> int: ...

    def labelled(self, index: int) -> Sample:
        """Return sample `index`, in 0 .. len-1."""

    def describe_position(self, index: int, at: int, *, label: bool) -> str:
        """Describe, for an error, where the input at position `at` of sample `index` comes from, or
        with `label` the label at that position."""


@dataclass(frozen=True)
class Stream:
    """Consecutive tokens of a token file: the whole file, or a split's sequences."""

    file: TokenFile
    sequences: range
    """Indices of the sequences; empty if the stream is only a part of one sequence."""
    positions: range
    """Positions of the stream's tokens in the file."""

    @staticmethod
    def of(file: TokenFile, sequences: range | None = None) -> Stream:
        """Return the stream of `sequences`, default: all. Raises DataError for a damaged index."""
        sequences = range(len(file.lengths)) if sequences is None else sequences
        first, last = file.starts(np.array([sequences.start, sequences.stop]))
        return Stream(file, sequences, range(int(first), int(last)))


class Corpus(Protocol):
    """The corpus or data set that ``data.source`` gives, with its splits."""

    @property
    def digest(self) -> str:
        """SHA-256, in hex, of everything that determines the corpus's content."""

    @property
    def content(self) -> str:
        """SHA-256, in hex, that identifies the content and does not depend on the location."""

    @property
    def entropy(self) -> float | None:
        """Unigram entropy in nats per token; None if unknown."""

    def part(self, split: Split) -> Stream | Dataset | None:
        """Return a split, as a stream of tokens or as samples; None if it does not exist. Raises
        DataError if it is damaged."""


class TokenDataset:
    """Cuts the stream of a token file into windows of inputs and labels.

    Sample i consists of the L+1 tokens i*L .. i*L+L. Neighbouring samples share one token, so every
    token of the stream except the first is the label of exactly one position.

    Args:
        file: the token file.
        sequence_length: L.
        span: positions in the file of the stream's tokens; default: the whole file.
        keep_last: whether tokens that do not fill a last window make a shorter sample, so that
            held-out text is scored to its last token; otherwise they are dropped.

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
        if self._samples <= 0:  # -1 if there are no tokens
            needed = 2 if keep_last else sequence_length + 1
            span_text = "" if span is None else f" from position {span.start} to {span.stop}"
            raise TooShort(
                file.path,
                f"has {count_noun(labels + 1, 'token')}{span_text}, but one sample needs {needed} "
                f"(train.sequence_length={sequence_length}): use more text"
                + ("" if keep_last else " or shorter sequences"),
            )

    def __len__(self) -> int:
        return self._samples

    def sample(self, index: int) -> npt.NDArray[np.int64]:
        """Return window `index` [L+1]; with `keep_last` the last window may be shorter, at least
        [2].

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

    def describe_position(self, index: int, at: int, *, label: bool) -> str:
        position = self.span.start + index * self.sequence_length + at + label
        return f"position {position} of {self.file.path}"
