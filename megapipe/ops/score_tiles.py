"""Attention tiles with soft-capped or ALiBi scores, written out in plain operations.

No kernel that returns an LSE computes these scores. As in :mod:`megapipe.ops.math_attention`, only
the scores of the query heads of one key/value head in a tile exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.context.positions import Positions
from megapipe.ops.math_attention import Heads, each_heads
from megapipe.ops.scores import ScoreModifiers


@dataclass(frozen=True)
class ScoreTile:
    """:class:`~megapipe.ops.tile_attention.TileKernel` for one tile with modified scores."""

    scores: ScoreModifiers
    positions: tuple[Positions, Positions] | None = None
    """Positions of the queries and of the keys, if scores depend on them (ALiBi)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for one in self._heads(q, k, v, causal, scale):
            own, sums = (x.unflatten(1, (-1, q.shape[2])) for x in one.forward())
            out[:, one.here], lse[:, one.here] = own, sums.squeeze(-1)
            del own, sums  # free them before the next heads
        return out, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        for g, one in enumerate(self._heads(q, k, v, causal, scale)):
            inputs = (x[:, one.here].flatten(1, 2) for x in (grad, out, lse.unsqueeze(-1)))
            own, grad_k[:, g], grad_v[:, g] = one.backward(*(x.to(lse.dtype) for x in inputs))
            grad_q[:, one.here] = own.unflatten(1, (-1, q.shape[2]))
            del own  # free it before the next heads
        return grad_q, grad_k, grad_v

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
    ) -> Iterator[Heads]:
        seen = positions = None
        if causal:
            s, t = q.shape[2], k.shape[2]
            seen = torch.ones(s, t, dtype=torch.bool, device=q.device).tril_()
        if self.positions is not None:
            of_queries, of_keys = self.positions
            positions = _tensor(of_queries, q), _tensor(of_keys, q)
        return each_heads(q, k, v, seen, positions, self.scores._replace(scale=scale))


def _tensor(positions: Positions, q: Tensor) -> Tensor:
    """Return positions as a tensor in the type of the scores."""
    high = torch.promote_types(q.dtype, torch.float32)
    runs = [
        torch.arange(run.first, run.last + 1, run.step, dtype=high, device=q.device)
        for run in positions.runs
    ]
    return torch.cat(runs)
