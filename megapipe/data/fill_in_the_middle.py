"""Fill-in-the-middle: documents rearranged so that a model learns to write what is between two
texts (Bavarian et al., 2207.14255).

A document is cut at two of its tokens into prefix, middle and suffix, which are put together as

====  ===============================================================================
PSM   ``prefix`` mark, prefix, ``suffix`` mark, suffix, ``middle`` mark, middle
SPM   ``prefix`` mark, ``suffix`` mark, suffix, ``middle`` mark, prefix, middle
====  ===============================================================================

SPM is what PSM gives for an empty prefix, with prefix and middle as its middle: the second of the
paper's two variants, as in Megatron-LM and StarCoder. All three parts and the marks are labels. The
end mark of a document stays at its end.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megapipe.config.data import DataConfig
from megapipe.data.dataset import Sample, TokenDataset
from megapipe.data.order import splitmix64
from megapipe.data.packing import PackedDataset, Packing
from megapipe.data.tokenizer import Tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError

Ids = npt.NDArray[np.int64]

MARKS = 3
"""Tokens by which a document that is rearranged is longer."""
_DRAWS = 4
"""Random numbers of a document: whether it is rearranged, in which order, and two cuts."""


class FimTokens(NamedTuple):
    """Ids of the tokens that come before each part."""

    prefix: int
    suffix: int
    middle: int


def marks_of(data: DataConfig, tokenizer: Tokenizer) -> FimTokens:
    """The ids of ``data.fim_tokens``. Raises DataError for one that the tokenizer does not have."""
    assert data.fim_tokens is not None, "asked for where documents are rearranged"
    added = tokenizer.added_tokens
    for name in data.fim_tokens:
        if name not in added:
            there = ", ".join(list(added)[:20]) or "none"
            raise DataError(
                f"tokenizer {data.tokenizer!r} has no token {name!r} (data.fim_tokens) apart from "
                f"those of texts; those that it has: {there}"
            )
    return FimTokens(*(added[name] for name in data.fim_tokens))


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rearranges some of the documents of a sample, as a function of its number alone.

    Attributes:
        marks: the tokens that part a document.
        eod: the token that ends a document.
        rate: share of the documents that are rearranged.
        spm_rate: share of those in the order SPM.
        seed: what is rearranged, and how, follows from it, `source` and the number of the sample.
        source: the name of the source in a mixture.
    """

    marks: FimTokens
    eod: int
    rate: float
    spm_rate: float
    seed: int
    source: str = ""

    def __call__(self, sample: int, documents: Sequence[Ids]) -> list[Ids]:
        """The documents of a sample [n] each, with or without an end mark as their last token; one
        that is rearranged is longer by :data:`MARKS`. An empty one stays as it is."""
        draws = self._draws(sample, len(documents))
        return [self._rearranged(*given) for given in zip(documents, draws.tolist(), strict=True)]

    def _draws(self, sample: int, documents: int) -> npt.NDArray[np.uint64]:
        """Random numbers [documents, 4] of 0 .. 2^64-1."""
        key = blake2b(
            struct.pack("<QQ", self.seed, sample), digest_size=8, person=b"fill-in-middle"
        )
        key.update(self.source.encode())
        first = np.frombuffer(key.digest(), "<u8")
        counted = first + np.arange(documents * _DRAWS, dtype=np.uint64)
        return splitmix64(counted).reshape(documents, _DRAWS)

    def _rearranged(self, document: Ids, draws: list[int]) -> Ids:
        whether, order, *cuts = draws
        length = len(document) - bool(len(document) and document[-1] == self.eod)
        if not length or whether >= self.rate * 2**64:
            return document
        first, second = sorted(cut % (length + 1) for cut in cuts)
        before, middle, after = np.split(document[:length], (first, second))
        p, s, m = (np.array([mark]) for mark in self.marks)
        if order < self.spm_rate * 2**64:
            parts = [p, s, after, m, before, middle]
        else:
            parts = [p, before, s, after, m, middle]
        return np.concatenate([*parts, document[length:]])


class WindowsInTheMiddle:
    """Windows of a stream, whose documents, or what of them is in a window, are rearranged.

    A window keeps its length of L+1 tokens: what the marks push over its end is left out.
    """

    def __init__(self, windows: TokenDataset, change: FillInTheMiddle) -> None:
        self.windows = windows
        self.change = change
        self.sequence_length = windows.sequence_length

    def __len__(self) -> int:
        return len(self.windows)

    def labelled(self, index: int) -> Sample:
        """Sample `index`. Raises IndexError if it is not in 0 .. len-1."""
        window = self.windows.sample(index)
        ends = np.flatnonzero(window == self.change.eod) + 1
        changed = np.concatenate(self.change(index, np.split(window, ends)))
        return Sample.of_window(changed[: len(window)], self.sequence_length)

    def place(self, index: int, at: int, *, label: bool) -> str:
        return _place(index, self.windows.file)


class PackedInTheMiddle(PackedDataset):
    """Packed documents that are rearranged, each by itself. `packing` has spare room for the marks
    of every one of them; what is not needed is padding."""

    def __init__(
        self,
        file: TokenFile,
        packing: Packing,
        sequence_length: int,
        padding: int,
        change: FillInTheMiddle,
    ) -> None:
        super().__init__(file, packing, sequence_length, padding)
        self.change = change

    def pieces(self, index: int) -> list[npt.NDArray[Any]]:
        return [*self.change(index, [np.asarray(p, np.int64) for p in super().pieces(index)])]

    def place(self, index: int, at: int, *, label: bool) -> str:
        return _place(index, self.file)


def _place(index: int, file: TokenFile) -> str:
    return f"sample {index} of {file.path}, whose documents are rearranged (data.fim_rate)"
