"""Fill-in-the-middle: documents are rearranged so that a model learns to infill (Bavarian et al.,
2207.14255).

A document is cut at two of its tokens into prefix, middle and suffix. Each part follows a mark,
which is a sentinel token. There are two orders.

  ====  ===============================================================================
  PSM   ``prefix`` mark, prefix, ``suffix`` mark, suffix, ``middle`` mark, middle
  SPM   ``prefix`` mark, ``suffix`` mark, suffix, ``middle`` mark, prefix, middle
  ====  ===============================================================================

SPM equals PSM with an empty prefix, and prefix plus middle as the middle: the second of the
paper's two variants, as in Megatron-LM and StarCoder. All three parts and the marks are labels. A
document's EOS token stays at its end.
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

NUM_SENTINELS = 3
"""Number of sentinel tokens that are added to a rearranged document."""
_DRAWS = 4
"""Number of random numbers per document: whether to rearrange it, the order, and two cuts."""


class FimTokens(NamedTuple):
    """Ids of the sentinel tokens that precede the three parts of a document."""

    prefix: int
    suffix: int
    middle: int


def fim_tokens_of(data: DataConfig, tokenizer: Tokenizer) -> FimTokens:
    """Return the ids of ``data.fim_tokens``. Raises DataError if the tokenizer lacks one."""
    assert data.fim_tokens is not None, "asked for where documents are rearranged"
    added = tokenizer.added_tokens
    for name in data.fim_tokens:
        if name not in added:
            existing = ", ".join(list(added)[:20]) or "none"
            raise DataError(
                f"tokenizer {data.tokenizer!r} has no token {name!r} (data.fim_tokens) that "
                f"no text contains; it has: {existing}"
            )
    return FimTokens(*(added[name] for name in data.fim_tokens))


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rearranges some documents of a sample, as a function of the sample's number.

    Attributes:
        marks: the sentinel tokens that precede a document's parts.
        eod: the EOS token, which ends a document.
        rate: fraction of the documents that are rearranged.
        spm_rate: fraction of the rearranged documents that get the order SPM.
        seed: determines all random choices, together with `source` and the sample's number.
        source: name of the source in a mixture.
    """

    fim_tokens: FimTokens
    eod: int
    rate: float
    spm_rate: float
    seed: int
    source: str = ""

    def __call__(self, sample: int, documents: Sequence[Ids]) -> list[Ids]:
        """Return the documents of sample number `sample`. Some of them are rearranged and so
        :data:`NUM_SENTINELS` tokens longer. A document [n] need not end with an EOS token, and an
        empty one stays unchanged."""
        draws = self._draws(sample, len(documents))
        return [self._rearranged(*given) for given in zip(documents, draws.tolist(), strict=True)]

    def _draws(self, sample: int, documents: int) -> npt.NDArray[np.uint64]:
        """Return random numbers in 0 .. 2^64-1 for the documents of a sample, [documents, 4]."""
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
        p, s, m = (np.array([token]) for token in self.fim_tokens)
        if order < self.spm_rate * 2**64:
            parts = [p, s, after, m, before, middle]
        else:
            parts = [p, before, s, after, m, middle]
        return np.concatenate([*parts, document[length:]])


class WindowsInTheMiddle:
    """Windows of a token stream with rearranged documents. If a window contains only a part of a
    document, this part is rearranged like a document.

    A window keeps its length of L+1 tokens: tokens that the marks push over the end are dropped.
    """

    def __init__(self, windows: TokenDataset, change: FillInTheMiddle) -> None:
        self.windows = windows
        self.change = change
        self.sequence_length = windows.sequence_length

    def __len__(self) -> int:
        return len(self.windows)

    def labelled(self, index: int) -> Sample:
        """Return sample `index`. Raises IndexError unless it is in 0 .. len-1."""
        window = self.windows.sample(index)
        ends = np.flatnonzero(window == self.change.eod) + 1
        changed = np.concatenate(self.change(index, np.split(window, ends)))
        return Sample.of_window(changed[: len(window)], self.sequence_length)

    def describe_position(self, index: int, at: int, *, label: bool) -> str:
        return _describe_sample(index, self.windows.file)


class PackedInTheMiddle(PackedDataset):
    """Packed documents, each of them rearranged separately. `packing` must leave
    :data:`NUM_SENTINELS` positions free per document; those without a sentinel are padding."""

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

    def describe_position(self, index: int, at: int, *, label: bool) -> str:
        return _describe_sample(index, self.file)


def _describe_sample(index: int, file: TokenFile) -> str:
    return f"sample {index} of {file.path}, whose documents are rearranged (data.fim_rate)"
