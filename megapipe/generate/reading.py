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

from megapipe.layers.kv_cache import KVCache
from megapipe.layers.microbatch import MicroBatch
from megapipe.model.interface import StageModule
from megapipe.ops.documents import Documents, document_ids, positions_in


class Texts(Protocol):
    """Texts that grow by a token at a time, and the logits of their next tokens."""

    def logits(self) -> Tensor:
        """Logits of the token that follows each text, [texts, padded vocabulary]."""

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text; those with None are at an end and are left out from now."""


def window_start(length: int, context: int) -> int:
    """First token that the model sees of a text of `length` tokens."""
    half = max(context // 2, 1)
    return -(-max(length - context, 0) // half) * half


class Reading:
    """Texts that a whole `model` has read so far, and its logits for the next tokens.

    Args:
        model: all layers, on `device`, in evaluation mode.
        texts: token ids of each, one or more.
        context: most tokens that the model sees at a time.
        room: tokens that will be appended to a text, at most.
        document_end: the token that ends a document, where attention ends at documents.
        resets_positions: positions begin anew in each document.
    """

    def __init__(
        self,
        model: StageModule,
        texts: Sequence[Sequence[int]],
        *,
        context: int,
        room: int,
        device: torch.device,
        document_end: int | None = None,
        resets_positions: bool = False,
    ) -> None:
        self.model = model
        self.texts = [list(text) for text in texts]
        self.context = context
        self.device = device
        self.document_end = document_end
        self.resets_positions = resets_positions
        longest = max(map(len, self.texts))
        self._columns = min(context, longest + room)
        self._tokens = torch.zeros(len(self.texts), self._columns, dtype=torch.int64)
        self._padding = torch.zeros(len(self.texts), dtype=torch.int64)
        """Columns before each text."""
        self._starts: list[int] = []
        """First token of each text that the columns show."""
        self._read = 0
        """Columns whose keys and values are there."""
        self._cache = KVCache(self._columns)

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of the token that follows each text, [texts, padded vocabulary]."""
        first, stop = self._fill()
        mb = MicroBatch(
            index=0,
            step=0,
            seed=0,
            tokens=self._tokens[:, first:stop].to(self.device),
            documents=self._documents(stop),
            start=first,
            positions=self._positions(first, stop),
            sequence_length=self.context,
        )
        self._read = stop
        return self.model.logits(None, mb, self._cache, last=True)[0]

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text; those with None are at an end and are left out from now."""
        kept = [i for i, token in enumerate(tokens) if token is not None]
        if len(kept) < len(tokens):
            self.texts = [self.texts[i] for i in kept]
            self._starts = [self._starts[i] for i in kept]
            rows = torch.tensor(kept, dtype=torch.int64)
            self._tokens, self._padding = self._tokens[rows], self._padding[rows]
            self._cache.keep(rows.to(self.device))
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

    def _documents(self, stop: int) -> Documents | None:
        """Documents that hide the padding, and other documents, from a token."""
        if self.document_end is None and not self._padding.any():
            return None
        return Documents(self._numbers(stop), self.device)

    def _numbers(self, stop: int) -> Tensor:
        """Number of the document of each column, [texts, stop]; padding is the first."""
        numbers = (torch.arange(stop) >= self._padding.unsqueeze(1)).long()
        if self.document_end is not None:
            numbers += document_ids(self._tokens[:, :stop], self.document_end)
        return numbers

    def _positions(self, first: int, stop: int) -> Tensor | None:
        """Position of each column in its text, [columns, texts]; None where it is the column."""
        if self.resets_positions:
            return positions_in(self._numbers(stop))[:, first:stop].t().to(self.device)
        if not self._padding.any():
            return None
        columns = torch.arange(first, stop).unsqueeze(1)
        return (columns - self._padding).clamp(min=0).to(self.device)
