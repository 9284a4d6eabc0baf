"""Totals of a step: one vector that is combined over the mesh, once, and that all ranks learn."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Wishes(NamedTuple):
    """Requests of a rank to all of them at the end of a step."""

    stop: bool = False
    """To save and end."""
    save: bool = False
    """To save a checkpoint."""
    finish: bool = False
    """To take the outcome of a save in the background, which has ended."""


class SourceStats(NamedTuple):
    """The part of a source of a mixture in a step."""

    loss_sum: float
    """Sum of its unmasked token losses, nats; NaN where the loss is the user's, which has only the
    sum of all."""
    tokens: int
    """Its unmasked tokens."""

    @property
    def loss(self) -> float:
        """Mean loss per unmasked token; NaN where there is none."""
        return self.loss_sum / self.tokens if self.tokens else math.nan


LARGEST = 1
"""How many values at the end of a packed vector are not summed: their maxima are taken."""


@dataclass(frozen=True)
class StepStats:
    """Sums over the ranks that they cover: one pipeline rank and its replicas, or all."""

    squared_norms: tuple[float, ...]
    """Squared norms of the gradients of each stage and, last, of the tied embedding."""
    loss_sum: float
    """Sum of all unmasked token losses, nats."""
    tokens: int
    """Unmasked tokens."""
    wishes: Wishes = field(default_factory=Wishes)
    """The requests of all ranks together."""
    by_source: tuple[SourceStats, ...] = ()
    """Of a mixture: the same of each source."""
    routing: tuple[float, ...] = ()
    """Numbers of routing, :func:`megapipe.train.routing.routing_totals`."""
    states: float = 0.0
    """NaN where the update before left weights or states that are not finite, else 0."""
    ahead: float = field(default=math.nan, compare=False)
    """Unmasked tokens of the next step; NaN: not known."""
    memory_gib: float = 0.0
    """Memory of the fullest rank; 0 where no rank knows its own."""

    def pack(self) -> Tensor:
        """[stages + 8 + 2 sources + those of routing], fp64: to be summed, but for the last
        `LARGEST`."""
        values = [value for source in self.by_source for value in source]
        values += self.routing
        values += [
            *self.squared_norms,
            self.loss_sum,
            self.tokens,
            *self.wishes,
            self.states,
            self.ahead,
        ]
        values.append(self.memory_gib)
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def unpack(cls, vector: Tensor, sources: int = 0, routing: int = 0) -> StepStats:
        """The totals of a mixture of so many sources, or of a run without, with so many numbers of
        routing."""
        values = vector.tolist()
        sums, counts = values[: 2 * sources : 2], values[1 : 2 * sources : 2]
        by_source = tuple(map(SourceStats, sums, map(int, counts)))
        told, rest = values[2 * sources :][:routing], values[2 * sources + routing :]
        *squares, loss_sum, tokens, stop, save, finish, states, ahead, memory = rest
        wishes = Wishes(stop > 0, save > 0, finish > 0)
        return cls(
            tuple(squares),
            loss_sum,
            int(tokens),
            wishes,
            by_source,
            tuple(told),
            states,
            ahead,
            memory,
        )

    @property
    def norm(self) -> float:
        """Root of the sum of the squares, added in stage order, so that no schedule changes a bit
        of it."""
        total = 0.0
        for square in self.squared_norms:
            total += square
        return math.sqrt(total)

    @property
    def loss(self) -> float:
        """Mean loss per unmasked token."""
        return self.loss_sum / max(self.tokens, 1)

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss_sum) and math.isfinite(self.norm)

    def equals(self, other: StepStats) -> bool:
        """Whether loss and squared norms are the same to the bit; NaN equals NaN."""
        own = (self.loss_sum, *self.squared_norms)
        pairs = zip(own, (other.loss_sum, *other.squared_norms), strict=True)
        return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)

    def not_finite(self) -> str:
        """Where in the model the gradients are not finite."""
        *stages, tied = (math.isfinite(square) for square in self.squared_norms)
        wrong = [str(stage) for stage, fine in enumerate(stages) if not fine]
        parts = [f"stages {', '.join(wrong)}"] if wrong else []
        if not tied:
            parts.append("the tied embedding")
        return "gradients of " + (" and ".join(parts) or "no stage")
