"""Texts that a model reads as they grow, each token once.

Keys and values of all that was read stay in a :class:`~megapipe.layers.kv_cache.KVCache`, as those
of the slices of a sequence do in training: a token is a slice of one position. Texts of unequal
length end at the same column; to attention the columns before a text are a document that it does
not see, and its positions count from its own first token::

    column     0  1  2  3  4          column 5: one more token of each
    text 0     ·  ·  T  h  e
    text 1     W  h  e  n  ␣

**Beyond the model's positions.** The model sees the end of a text, of `context` tokens at most.
What it sees begins at a multiple of half of that, so most tokens only append: when the window is
full its earlier half is given up and the rest is read again. Where it begins depends on the text's
own length alone, so a text is continued alike by itself and among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megapipe.inference.model import Model
from megapipe.layers.kv_cache import KVCache


class Texts(Protocol):
    """Texts that grow by a token at a time, and the logits of their next tokens."""

    def logits(self) -> Tensor | None:
        """Logits of the token that follows each text, [texts, V]; None on ranks of a model that do
        not have its last stage."""

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text; those with None are at an end and are left out from now."""


def window_start(length: int, context: int) -> int:
    """First token that the model sees of a text of `length` tokens."""
    half = max(context // 2, 1)
    return -(-max(length - context, 0) // half) * half


class CachedDecoder:
    """Texts that a model has read so far, and its logits for the next tokens.

    Args:
        texts: token ids of each, one or more.
        room: tokens that will be appended to a text, at most.
    """

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], *, room: int) -> None:
        self.model = model
        self.texts = [list(text) for text in texts]
        self.context = model.source.context
        longest = max(map(len, self.texts))
        self._columns = min(self.context, longest + room)
        self._tokens = torch.zeros(len(self.texts), self._columns, dtype=torch.int64)
        self._padding = torch.zeros(len(self.texts), dtype=torch.int64)
        """Columns before each text."""
        self._starts: list[int] = []
        """First token of each text that the columns show."""
        self._read = 0
        """Columns whose keys and values are there."""
        self._cache = KVCache(self._columns)

    def logits(self) -> Tensor | None:
        """Logits of the token that follows each text, [texts, V], where the last stage is."""
        first, stop = self._fill()
        mb = self.model.microbatch(self._tokens[:, :stop], start=first, padding=self._padding)
        self._read = stop
        logits = self.model.logits(mb, self._cache, last=True)
        return None if logits is None else logits[0]

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text; those with None are at an end and are left out from now."""
        kept = [i for i, token in enumerate(tokens) if token is not None]
        if len(kept) < len(tokens):
            self.texts = [self.texts[i] for i in kept]
            self._starts = [self._starts[i] for i in kept]
            rows = torch.tensor(kept, dtype=torch.int64)
            self._tokens, self._padding = self._tokens[rows], self._padding[rows]
            self._cache.keep(rows.to(self.model.device))
        for text, i in zip(self.texts, kept, strict=True):
            token = tokens[i]
            assert token is not None
            text.append(token)

    def _fill(self) -> tuple[int, int]:
        """Write the tokens that are to be read into their columns: from, and up to, which one."""
        starts = [window_start(len(text), self.context) for text in self.texts]
        if starts == self._starts and self._read < self._columns:
            self._tokens[:, self._read] = torch.tensor([text[-1] for text in self.texts])
            return self._read, self._read + 1
        self._starts, self._cache = starts, KVCache(self._columns)
        windows = [text[start:] for text, start in zip(self.texts, starts, strict=True)]
        stop = max(map(len, windows))
        self._padding = torch.tensor([stop - len(window) for window in windows])
        for row, window in enumerate(windows):
            self._tokens[row, stop - len(window) : stop] = torch.tensor(window)
        return 0, stop
