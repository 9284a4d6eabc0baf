"""Incremental decoding with a KV cache: each token is read once.

Keys and values of all tokens read stay in a :class:`~megapipe.layers.kv_cache.KVCache`. Training
uses the same cache for sequence slices; here each token is a slice of one position. Texts of
unequal length end at the same column. Columns before a text are padding, a separate document that
attention does not see. Positions count from a text's first token::

    column     0  1  2  3  4          column 5: one more token of each
    text 0     ·  ·  T  h  e
    text 1     W  h  e  n  ␣

**Beyond the model's positions.** The model sees at most the last `context` tokens of a text. The
first token that it sees has an index that is a multiple of `context` / 2, so most tokens are only
appended. When the cache is full, the earlier half of its tokens is dropped and the rest is read
again. This index depends only on the length of the text, so the continuation does not depend on
other texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megapipe.inference.model import Model
from megapipe.layers.kv_cache import KVCache


class Texts(Protocol):
    """Texts that grow by one token at a time, and the logits of their next tokens."""

    def logits(self) -> Tensor | None:
        """Return the next-token logits of each text, [texts, V]; None on ranks without the last
        stage."""

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text. None means that the text has ended: it is removed."""


def window_start(length: int, context: int) -> int:
    """Return the index of the first token that the model sees in a text of `length` tokens."""
    half = max(context // 2, 1)
    return -(-max(length - context, 0) // half) * half


class CachedDecoder:
    """Texts that grow, with their KV cache, and the logits of their next tokens.

    Args: texts: token ids of each text; at least one text. room: maximum number of tokens that will
    be appended to a text.
    """

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], *, room: int) -> None:
        self.model = model
        self.texts = [list(text) for text in texts]
        self.context = model.source.context
        longest = max(map(len, self.texts))
        self._columns = min(self.context, longest + room)
        self._tokens = torch.zeros(len(self.texts), self._columns, dtype=torch.int64)
        self._padding = torch.zeros(len(self.texts), dtype=torch.int64)
        """Number of padding columns before each text."""
        self._starts: list[int] = []
        """For each text, the index of its first token in the cache; earlier ones are cut off."""
        self._read = 0
        """Number of columns whose keys and values are cached."""
        self._cache = KVCache(self._columns)

    def logits(self) -> Tensor | None:
        """Return the texts' next-token logits, [texts, V]; None on ranks without the last stage."""
        first, stop = self._fill()
        mb = self.model.microbatch(self._tokens[:, :stop], start=first, padding=self._padding)
        self._read = stop
        logits = self.model.logits(mb, self._cache, last=True)
        return None if logits is None else logits[0]

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text. None means that the text has ended: it is removed."""
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
        """Write the tokens to read next into their columns. Return the range of these columns."""
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
