"""Sampling of the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.layers.rng import seed_of


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled, and when a text ends. Raises ConfigError for values out of range."""

    tokens: int = 200
    """Maximum number of tokens to add to a text."""
    temperature: float = 0.8
    """Divisor of the logits; 0: always take the most probable token."""
    top_k: int | None = None
    """Number of most probable tokens to sample from; None: all tokens."""
    top_p: float | None = None
    """Minimum total probability of the most probable tokens to sample from. The smallest such set
    is taken, after `top_k` (Holtzman et al., 1904.09751); None: all tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a text. The text ends before the first stop string that is generated."""
    seed: int = 0
    """Seed of the sampling."""

    def __post_init__(self) -> None:
        wrong = {
            "tokens": self.tokens < 1 and "at least 1",
            "temperature": not 0 <= self.temperature < float("inf") and "a number from 0",
            "top_k": self.top_k is not None and self.top_k < 1 and "at least 1",
            "top_p": self.top_p is not None and not 0 < self.top_p <= 1 and "above 0, at most 1",
            "stop": "" in self.stop and "a text that is not empty",
        }
        for name, expected in wrong.items():
            if expected:
                value = "" if name == "stop" else getattr(self, name)
                raise ConfigError(f"{name}={value!r}: expected {expected}")

    def source(self, number: int) -> torch.Generator:
        """Return the random generator of a text whose prompt equals `number` earlier prompts."""
        return torch.Generator().manual_seed(seed_of(self.seed, "generate", number))


def sample_token(logits: Tensor, sampling: Sampling, source: torch.Generator) -> int:
    """Sample a token from logits [V], all finite. Draws one random number from `source`, or none at
    temperature 0."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    odds = ((logits.double() - logits.max()) / sampling.temperature).softmax(-1)
    ids = torch.arange(len(odds))
    if sampling.top_k is not None or sampling.top_p is not None:
        odds, ids = odds.topk(min(sampling.top_k or len(odds), len(odds)))
    below = odds.cumsum(0) - odds  # summed probability of the tokens before each token
    total = below[-1] + odds[-1]
    if sampling.top_p is not None:
        chosen = int((below < sampling.top_p * total).sum())
        below, total = below[:chosen], odds[:chosen].sum()
    point = torch.rand((), dtype=torch.float64, generator=source) * total
    return int(ids[int((below <= point).sum()) - 1])
