"""Attention with its scores written out, for what torch's kernels do not compute.

One key/value head at a time, so the scores of its query heads, [b, n, s, t], are all that exist at
once. As flash attention does (2205.14135), the forward keeps the logarithm of each row's sum, and
the backward computes the scores again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.ops.documents import Documents
from megapipe.ops.scores import Scores


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scores: Scores
) -> Tensor:
    """q [b, heads, s, d], k and v [b, groups, t, d] -> [b, heads, s, d], in fp32 (fp64 for fp64).

    The queries are the last s of the t positions. There is no dropout.
    """
    if torch.compiler.is_compiling():  # a compiler sees for itself what to keep
        return _composed(q, k, v, documents, scores)
    return _Explicit.apply(q, k, v, documents, scores)


def visible(
    s: int, t: int, documents: Documents | None, scores: Scores, device: torch.device
) -> Tensor:
    """[s, t], with documents [b, 1, s, t], bool: which keys each query sees."""
    if documents is not None:
        seen = documents.mask(s)
    else:
        seen = torch.ones(s, t, dtype=torch.bool, device=device).tril_(t - s)
    if scores.window is None:
        return seen
    # triu of a mask that others hold is a copy
    return seen.triu(t - s - scores.window + 1)


def alibi(s: int, t: int, slopes: tuple[float, ...], like: Tensor) -> Tensor:
    """[heads, s, t]: what ALiBi adds to the scores of visible keys."""
    key = torch.arange(t, dtype=like.dtype, device=like.device)
    before = key[t - s :, None] - key  # positions from key to query
    return torch.tensor(slopes, dtype=like.dtype, device=like.device)[:, None, None] * -before


class _Heads(NamedTuple):
    """The query heads of one key/value head, in the type of the scores."""

    here: slice
    q: Tensor
    """[b, n, s, d]"""
    k: Tensor
    """[b, 1, t, d]"""
    v: Tensor
    scores: Scores

    def products(self) -> Tensor:
        """[b, n, s, t]"""
        scale = self.scores.scale or 1 / math.sqrt(self.q.shape[-1])
        return (self.q @ self.k.transpose(-1, -2)).mul_(scale)

    def finish(self, x: Tensor, seen: Tensor) -> Tensor:
        """The scores that a softmax takes, in place of products that are capped already."""
        if self.scores.slopes is not None:
            x += alibi(x.shape[-2], x.shape[-1], self.scores.slopes, x)
        return x.masked_fill_(~seen, float("-inf"))


def _heads(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Iterator[_Heads]:
    groups = k.shape[1]
    n, high = q.shape[1] // groups, torch.promote_types(q.dtype, torch.float32)
    for g in range(groups):
        here = slice(g * n, (g + 1) * n)
        own = scores if scores.slopes is None else scores._replace(slopes=scores.slopes[here])
        key, value = (x[:, g : g + 1].to(high) for x in (k, v))
        yield _Heads(here, q[:, here].to(high), key, value, own)


class _Explicit(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None,
        scores: Scores,
    ) -> Tensor:
        b, heads, s, d = q.shape
        high = torch.promote_types(q.dtype, torch.float32)
        # positions first, so that the heads of one are one row of memory
        y = q.new_empty(s, b, heads, d).permute(1, 2, 0, 3)
        sums = q.new_empty(b, heads, s, 1, dtype=high)
        seen = visible(s, k.shape[2], documents, scores, q.device)
        for one in _heads(q, k, v, scores):
            x = one.products()
            if scores.softcap is not None:
                x = x.div_(scores.softcap).tanh_().mul_(scores.softcap)
            x = one.finish(x, seen)
            top = x.amax(-1, keepdim=True)
            total = x.sub_(top).exp_().sum(-1, keepdim=True)
            y[:, one.here] = (x @ one.v).div_(total)
            sums[:, one.here] = total.log_().add_(top)
        ctx.save_for_backward(q, k, v, y, sums)
        ctx.documents, ctx.scores = documents, scores
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, sums = ctx.saved_tensors
        scores: Scores = ctx.scores
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        seen = visible(q.shape[2], k.shape[2], ctx.documents, scores, q.device)
        scale = scores.scale or 1 / math.sqrt(q.shape[-1])
        for g, one in enumerate(_heads(q, k, v, scores)):
            x, slope = one.products(), None
            if scores.softcap is not None:
                x = x.div_(scores.softcap).tanh_()
                slope = x.square().neg_().add_(1)
                x.mul_(scores.softcap)
            shares = one.finish(x, seen).sub_(sums[:, one.here]).exp_()
            own = grad[:, one.here].to(x.dtype)
            grad_v[:, g] = (shares.transpose(-1, -2) @ own).sum(1)
            mean = (own * y[:, one.here]).sum(-1, keepdim=True)
            grad_x = (own @ one.v.transpose(-1, -2)).sub_(mean).mul_(shares).mul_(scale)
            if slope is not None:
                grad_x.mul_(slope)
            grad_q[:, one.here] = grad_x @ one.k
            grad_k[:, g] = (grad_x.transpose(-1, -2) @ one.q).sum(1)
        return grad_q, grad_k, grad_v, None, None


def _composed(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scores: Scores
) -> Tensor:
    """The same by operations that autograd differentiates, all heads at once."""
    s, t, groups = q.shape[2], k.shape[2], k.shape[1]
    high = torch.promote_types(q.dtype, torch.float32)
    scale = scores.scale or 1 / math.sqrt(q.shape[-1])
    wide, k, v = q.to(high).unflatten(1, (groups, -1)), k.to(high), v.to(high)
    x = torch.einsum("bgnsd,bgtd->bgnst", wide, k) * scale
    if scores.softcap is not None:
        x = (x / scores.softcap).tanh() * scores.softcap
    if scores.slopes is not None:
        x = x + alibi(s, t, scores.slopes, x).unflatten(0, (groups, -1))
    seen = visible(s, t, documents, scores, q.device)
    x = x.masked_fill(~(seen if documents is None else seen.unsqueeze(1)), float("-inf"))
    y = torch.einsum("bgnst,bgtd->bgnsd", x.softmax(-1), v)
    return y.flatten(1, 2).to(q.dtype)
