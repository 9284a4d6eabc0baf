"""Texts that a model reads anew for every token: for models that keep no keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.generate.reading import window_start
from megapipe.layers.microbatch import MicroBatch
from megapipe.model.interface import StageModule


class Rereading:
    """Texts that grow, and the logits of a whole `model` for their next tokens.

    The model must be causal: texts of unequal length are filled up at their ends. It sees the end
    of a text, of `context` tokens at most.
    """

    def __init__(
        self,
        model: StageModule,
        texts: Sequence[Sequence[int]],
        *,
        context: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.texts = [list(text) for text in texts]
        self.context = context
        self.device = device

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Logits of the token that follows each text, [texts, vocabulary]."""
        windows = [text[window_start(len(text), self.context) :] for text in self.texts]
        tokens = torch.zeros(len(windows), max(map(len, windows)), dtype=torch.int64)
        for row, window in enumerate(windows):
            tokens[row, : len(window)] = torch.tensor(window)
        mb = MicroBatch(index=0, step=0, seed=0, tokens=tokens.to(self.device))
        logits = self.model.logits(None, mb)  # [s, b, V]
        last = torch.tensor([len(window) - 1 for window in windows], device=self.device)
        return logits[last, torch.arange(len(windows), device=self.device)]

    def append(self, tokens: Sequence[int | None]) -> None:
        """Append a token to each text; those with None are at an end and are left out from now."""
        pairs = zip(self.texts, tokens, strict=True)
        self.texts = [[*text, token] for text, token in pairs if token is not None]
