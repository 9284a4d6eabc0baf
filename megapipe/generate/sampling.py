"""The choice of the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.errors import ConfigError
from megapipe.layers.rng import seed_of


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and when a text ends. Raises ConfigError for values without sense."""

    tokens: int = 200
    """Most tokens to add to a text."""
    temperature: float = 0.8
    """Logits are divided by it; 0 takes the most probable token."""
    top_k: int | None = None
    """Choose among this many most probable tokens."""
    top_p: float | None = None
    """Choose among the fewest tokens that have this probability together (Holtzman et al.,
    1904.09751), after `top_k`."""
    stop: tuple[str, ...] = ()
    """A text ends before the first of these that comes up in what is added."""
    seed: int = 0
    """Seed of the choices."""

    def __post_init__(self) -> None:
        wrong = {
            "tokens": self.tokens < 1 and "at least 1",
            "temperature": not 0 <= self.temperature < float("inf") and "a number from 0",
            "top_k": self.top_k is not None and self.top_k < 1 and "at least 1",
            "top_p": self.top_p is not None and not 0 < self.top_p <= 1 and "above 0, at most 1",
            "stop": "" in self.stop and "strings that are not empty",
        }
        for name, expected in wrong.items():
            if expected:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected {expected}")

    def source(self, number: int) -> torch.Generator:
        """Random numbers for a text whose prompt was given `number` times before."""
        return torch.Generator().manual_seed(seed_of(self.seed, "generate", number))


def sample_token(logits: Tensor, sampling: Sampling, source: torch.Generator) -> int:
    """A token by its finite logits [V]; takes one random number from `source`, none at temperature
    0."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    odds = ((logits.double() - logits.max()) / sampling.temperature).softmax(-1)
    ids = torch.arange(len(odds))
    if sampling.top_k is not None or sampling.top_p is not None:
        odds, ids = odds.topk(min(sampling.top_k or len(odds), len(odds)))
    below = odds.cumsum(0) - odds  # probability of what comes before each
    total = below[-1] + odds[-1]
    if sampling.top_p is not None:
        chosen = int((below < sampling.top_p * total).sum())
        below, total = below[:chosen], odds[:chosen].sum()
    point = torch.rand((), dtype=torch.float64, generator=source) * total
    return int(ids[int((below <= point).sum()) - 1])
