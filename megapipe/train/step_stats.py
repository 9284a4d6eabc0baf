"""Totals of a step: one vector that is reduced over the mesh once, so that all ranks have it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class RankRequests(NamedTuple):
    """Requests of a rank to all ranks at the end of a step."""

    stop: bool = False
    """Whether to save and end."""
    save: bool = False
    """Whether to save a checkpoint."""
    finish_save: bool = False
    """Whether to finish an asynchronous save that has ended."""


class SourceStats(NamedTuple):
    """Totals of one source of a mixture in a step."""

    loss_sum: float
    """Sum of the source's unmasked token losses, nats; NaN with a user-defined loss, which only has
    the sum of all sources."""
    tokens: int
    """Number of unmasked tokens of the source."""

    @property
    def loss(self) -> float:
        """Mean loss per unmasked token; NaN without tokens."""
        return self.loss_sum / self.tokens if self.tokens else math.nan


LARGEST = 1
"""Number of values at the end of a packed vector that are reduced by maximum, not by sum."""


@dataclass(frozen=True)
class StepStats:
    """Totals of a step over some ranks: one pipeline rank and its replicas, or all ranks."""

    squared_norms: tuple[float, ...]
    """Squared norms of the gradients of each stage and, last, of the tied embedding."""
    loss_sum: float
    """Sum of all unmasked token losses, nats."""
    tokens: int
    """Number of unmasked tokens."""
    requests: RankRequests = field(default_factory=RankRequests)
    """Combined requests of all these ranks."""
    by_source: tuple[SourceStats, ...] = ()
    """Totals of each source of a mixture."""
    routing: tuple[float, ...] = ()
    """Routing totals, see :func:`megapipe.train.make_followers.routing_totals`."""
    states: float = 0.0
    """Check of the previous update: 0 if it left finite weights and states, else NaN."""
    ahead: float = field(default=math.nan, compare=False)
    """Number of unmasked tokens in the next step's batch; NaN: unknown."""
    memory_gib: float = 0.0
    """Memory in GiB of the rank that uses most; 0 if unknown."""

    def pack(self) -> Tensor:
        """Pack the totals into a tensor of fp64, [stages + 8 + 2 * sources + routing totals]. Over
        ranks the last :data:`LARGEST` values are reduced by maximum, the others by sum."""
        values = [value for source in self.by_source for value in source]
        values += self.routing
        values += [
            *self.squared_norms,
            self.loss_sum,
            self.tokens,
            *self.requests,
            self.states,
            self.ahead,
        ]
        values.append(self.memory_gib)
        return torch.tensor(values, dtype=torch.float64)

    @classmethod
    def unpack(cls, vector: Tensor, sources: int = 0, routing: int = 0) -> StepStats:
        """Unpack a packed vector. `sources`: number of sources of a mixture (0: no mixture).
        `routing`: number of routing totals."""
        values = vector.tolist()
        sums, counts = values[: 2 * sources : 2], values[1 : 2 * sources : 2]
        by_source = tuple(map(SourceStats, sums, map(int, counts)))
        routing_stats, rest = values[2 * sources :][:routing], values[2 * sources + routing :]
        *squares, loss_sum, tokens, stop, save, finish, states, ahead, memory = rest
        requests = RankRequests(stop > 0, save > 0, finish > 0)
        return cls(
            tuple(squares),
            loss_sum,
            int(tokens),
            requests,
            by_source,
            tuple(routing_stats),
            states,
            ahead,
            memory,
        )

    @property
    def norm(self) -> float:
        """Global gradient norm; squares are added in stage order, so that the norm is bitwise equal
        under all schedules."""
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
        """Whether loss and squared norms are bitwise equal; NaN equals NaN."""
        own = (self.loss_sum, *self.squared_norms)
        pairs = zip(own, (other.loss_sum, *other.squared_norms), strict=True)
        return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)

    def not_finite(self) -> str:
        """Describe which gradients are not finite: of which stages, or of the tied embedding."""
        *stages, tied = (math.isfinite(square) for square in self.squared_norms)
        wrong = [str(stage) for stage, fine in enumerate(stages) if not fine]
        parts = [f"stages {', '.join(wrong)}"] if wrong else []
        if not tied:
            parts.append("the tied embedding")
        return "gradients of " + (" and ".join(parts) or "no stage")
