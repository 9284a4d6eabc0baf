"""Attention in plain operations, for scores that torch's attention kernels do not compute.

One key/value head is computed at a time, so only the scores of that head's n query heads, [b, n, s,
t], exist at once. As in flash attention (2205.14135), the forward saves the log-sum-exp of each row
of scores, and the backward recomputes the scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.ops.documents import Documents
from megapipe.ops.scores import ScoreModifiers

QueryKeyPositions = tuple[Tensor, Tensor]
"""Positions of queries [s] and of keys [t], in the type of the scores."""


def math_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scores: ScoreModifiers
) -> Tensor:
    """Attend in fp32 or fp64: q [b, heads, s, d], k and v [b, groups, t, d] -> [b, heads, s, d].

    The queries are the last s of the t positions. There is no dropout.
    """
    if torch.compiler.is_compiling():  # the compiler decides what to save
        return _composed(q, k, v, documents, scores)
    return _Explicit.apply(q, k, v, documents, scores)


def visible(
    s: int, t: int, documents: Documents | None, scores: ScoreModifiers, device: torch.device
) -> Tensor:
    """Return which keys each query sees: bool [s, t], or [b, 1, s, t] with documents."""
    if documents is not None:
        seen = documents.mask(s)
    else:
        seen = torch.ones(s, t, dtype=torch.bool, device=device).tril_(t - s)
    if scores.window is None:
        return seen
    # triu copies, and does not change a cached mask
    return seen.triu(t - s - scores.window + 1)


def query_key_positions(
    s: int, t: int, dtype: torch.dtype, device: torch.device
) -> QueryKeyPositions:
    """Return the positions of queries, the last s of t positions, and of keys, all t."""
    keys = torch.arange(t, dtype=dtype, device=device)
    return keys[t - s :], keys


def alibi(positions: QueryKeyPositions, slopes: tuple[float, ...]) -> Tensor:
    """Return [heads, s, t]: what ALiBi adds to the scores of visible keys."""
    queries, keys = positions
    return slopes_on(slopes, keys.dtype, keys.device)[:, None, None] * (keys - queries[:, None])


def slopes_on(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ALiBi slopes [heads] on a device; cached for GPUs, as the host waits for the copy."""
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(slopes, dtype=dtype, device=device)
    return _copied(slopes, dtype, device)


@lru_cache(maxsize=64)
def _copied(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # training may use the result after an evaluation
        return torch.tensor(slopes, dtype=dtype, device=device)


class Heads(NamedTuple):
    """One key/value head and its n query heads, in the type of the scores."""

    here: slice
    q: Tensor
    """Queries [b, n * s, d]."""
    k: Tensor
    """Keys [b, t, d]."""
    v: Tensor
    seen: Tensor | None
    """Keys that each query sees, bool, [s, t] or [b, 1, s, t]; None: all keys."""
    positions: QueryKeyPositions | None
    """Positions of queries and keys, if scores depend on positions."""
    scores: ScoreModifiers

    @property
    def scale(self) -> float:
        return self.scores.scale or 1 / math.sqrt(self.q.shape[-1])

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the output [b, n * s, d], and the log-sum-exp of each score row [b, n * s, 1]."""
        x, _ = self._scores(slope=False)
        top = x.amax(-1, keepdim=True)
        total = x.sub_(top).exp_().sum(-1, keepdim=True)
        return (x @ self.v).div_(total), total.log_().add_(top)

    def backward(self, grad: Tensor, y: Tensor, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries [b, n * s, d], key and value [b, t, d]."""
        x, slope = self._scores(slope=True)
        shares = x.sub_(sums).exp_()
        grad_v = shares.transpose(1, 2) @ grad
        mean = (grad * y).sum(-1, keepdim=True)
        grad_x = (grad @ self.v.transpose(1, 2)).sub_(mean).mul_(shares).mul_(self.scale)
        del x, shares
        if slope is not None:
            grad_x.mul_(slope)
        return grad_x @ self.k, grad_x.transpose(1, 2) @ self.q, grad_v

    def _scores(self, *, slope: bool) -> tuple[Tensor, Tensor | None]:
        """Return the input of the softmax, [b, n * s, t], and, with `slope` and capped scores, the
        derivative of the soft cap."""
        x, found = (self.q @ self.k.transpose(1, 2)).mul_(self.scale), None
        if self.scores.softcap is not None:
            x = x.div_(self.scores.softcap).tanh_()
            found = x.square().neg_().add_(1) if slope else None
            x.mul_(self.scores.softcap)
        by_head = x.unflatten(1, (self.here.stop - self.here.start, -1))  # [b, n, s, t]
        if self.scores.slopes is not None:
            assert self.positions is not None
            by_head += alibi(self.positions, self.scores.slopes)
        if self.seen is not None:
            by_head.masked_fill_(~self.seen, float("-inf"))
        return x, found


def each_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None,
    positions: QueryKeyPositions | None,
    scores: ScoreModifiers,
) -> Iterator[Heads]:
    """Yield each key/value head with its query heads, in the type of the scores."""
    groups = k.shape[1]
    n, high = q.shape[1] // groups, torch.promote_types(q.dtype, torch.float32)
    for g in range(groups):
        here = slice(g * n, (g + 1) * n)
        own = scores if scores.slopes is None else scores._replace(slopes=scores.slopes[here])
        key, value = (x[:, g].to(high) for x in (k, v))
        yield Heads(here, q[:, here].flatten(1, 2).to(high), key, value, seen, positions, own)


def _heads(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scores: ScoreModifiers
) -> Iterator[Heads]:
    s, t, high = q.shape[2], k.shape[2], torch.promote_types(q.dtype, torch.float32)
    seen = visible(s, t, documents, scores, q.device)
    positions = None if scores.slopes is None else query_key_positions(s, t, high, q.device)
    return each_heads(q, k, v, seen, positions, scores)


class _Explicit(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None,
        scores: ScoreModifiers,
    ) -> Tensor:
        b, heads, s, d = q.shape
        # positions first, so that all heads of a position are contiguous
        y = q.new_empty(s, b, heads, d).permute(1, 2, 0, 3)
        sums = q.new_empty(b, heads, s, 1, dtype=torch.promote_types(q.dtype, torch.float32))
        for one in _heads(q, k, v, documents, scores):
            for whole, own in zip((y, sums), one.forward(), strict=True):
                whole[:, one.here] = own.unflatten(1, (-1, s))
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.documents, ctx.scores = documents, scores
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        for g, one in enumerate(_heads(q, k, v, ctx.documents, ctx.scores)):
            inputs = (x[:, one.here].flatten(1, 2) for x in (grad, y, sums))
            own, grad_k[:, g], grad_v[:, g] = one.backward(*(x.to(sums.dtype) for x in inputs))
            grad_q[:, one.here] = own.unflatten(1, (-1, q.shape[2]))
            del own  # free it before the next heads
        return grad_q, grad_k, grad_v, None, None


def _composed(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scores: ScoreModifiers
) -> Tensor:
    """Attend with operations that autograd differentiates, all heads at once."""
    s, t, groups = q.shape[2], k.shape[2], k.shape[1]
    high = torch.promote_types(q.dtype, torch.float32)
    scale = scores.scale or 1 / math.sqrt(q.shape[-1])
    wide, k, v = q.to(high).unflatten(1, (groups, -1)), k.to(high), v.to(high)
    x = torch.einsum("bgnsd,bgtd->bgnst", wide, k) * scale
    if scores.softcap is not None:
        x = (x / scores.softcap).tanh() * scores.softcap
    if scores.slopes is not None:
        positions = query_key_positions(s, t, high, q.device)
        x = x + alibi(positions, scores.slopes).unflatten(0, (groups, -1))
    seen = visible(s, t, documents, scores, q.device)
    x = x.masked_fill(~(seen if documents is None else seen.unsqueeze(1)), float("-inf"))
    y = torch.einsum("bgnst,bgtd->bgnsd", x.softmax(-1), v)
    return y.flatten(1, 2).to(q.dtype)
