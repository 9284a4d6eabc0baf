"""Decoding without a cache: the model reads each text again for every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.generate.cached_decoder import window_start
from megapipe.inference.model import Model


class UncachedDecoder:
    """Texts that grow, and the logits for their next tokens from a `model` without KV cache.

    The model must be causal, because texts of unequal length are padded at their ends. The model
    sees at most the last `context` tokens of a text.
    """

    def __init__(self, model: Model, texts: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.texts = [list(text) for text in texts]

    def logits(self) -> Tensor | None:
        """Return the texts' next-token logits, [texts, V]; None on ranks without the last stage."""
        context = self.model.source.context
        windows = [text[window_start(len(text), context) :] for text in self.texts]
        tokens = torch.zeros(len(windows), max(map(len, windows)), dtype=torch.int64)
        for row, window in enumerate(windows):
            tokens[row, : len(window)] = torch.tensor(window)
        logits = self.model.logits(self.model.microbatch(tokens))  # [s, b, V]
        if logits is None:
            return None
        last = torch.tensor([len(window) - 1 for window in windows], device=logits.device)
        return logits[last, torch.arange(len(windows), device=logits.device)]

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text. None means that the text has ended: it is removed."""
        pairs = zip(self.texts, tokens, strict=True)
        self.texts = [[*text, token] for text, token in pairs if token is not None]
