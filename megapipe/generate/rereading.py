"""Texts that a model reads anew for every token: for models that keep no keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.generate.reading import window_start
from megapipe.inference.model import Model


class UncachedDecoder:
    """Texts that grow, and the logits of a `model` for their next tokens.

    The model must be causal: texts of unequal length are filled up at their ends. It sees the end
    of a text, as many tokens as its context has at most.
    """

    def __init__(self, model: Model, texts: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.texts = [list(text) for text in texts]

    def logits(self) -> Tensor | None:
        """Logits of the token that follows each text, [texts, V], where the last stage is."""
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
        """Append a token to each text; those with None are at an end and are left out from now."""
        pairs = zip(self.texts, tokens, strict=True)
        self.texts = [[*text, token] for text, token in pairs if token is not None]
