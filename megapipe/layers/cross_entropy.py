"""Cross-entropy over a vocabulary split by tp, without ever gathering the logits.

One all-gather exchanges three values per token (:mod:`megapipe.ops.loss`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.distributed.collectives import all_gather
from megapipe.distributed.mesh import Axis
from megapipe.ops.loss import Labels, TorchLoss, gradient, loss_dtype, merge_vocab_stats


def gather_vocab_stats(shares: Tensor, tp: Axis) -> Tensor:
    """Gather the tp ranks' vocab stats (:mod:`megapipe.ops.loss`): [3, n] -> [tp, 3, n]."""
    return all_gather(shares, tp).unflatten(0, (tp.size, 3))


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int) -> Tensor:
        x = logits.to(loss_dtype(logits.dtype), copy=True).flatten(0, -2)
        local_labels = Labels.of(labels.flatten(), x.shape[-1], tp.index, vocab_size)
        losses, factor = merge_vocab_stats(
            gather_vocab_stats(TorchLoss().local_stats(x, local_labels), tp), tp.index
        )
        ctx.save_for_backward(x, local_labels.column, local_labels.elsewhere, factor)
        ctx.numbers = local_labels.columns, local_labels.tp_index
        ctx.like = logits.dtype, logits.shape
        return losses.view_as(labels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        x, column, elsewhere, factor = ctx.saved_tensors
        local_labels = Labels(column, elsewhere, *ctx.numbers)
        dtype, shape = ctx.like
        # the graph is walked once, so its largest tensor, x, may be overwritten
        found = gradient(x, local_labels, factor, grad.flatten())
        return found.to(dtype).view(shape), None, None, None


class _SoftCapped(Function):
    """In-place soft cap. Nothing else may use the logits; only the result is saved."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, cap: float) -> Tensor:
        y = logits.div_(cap).tanh_().mul_(cap)
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits)
        ctx.cap = cap
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return (y / ctx.cap).square_().neg_().add_(1).mul_(grad), None


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), computed in place."""
    return _SoftCapped.apply(logits, cap)


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int
) -> Tensor:
    """Return the loss of each token in nats, [s, b], in fp32 (fp64 for fp64).

    `logits` is [s, b, V/tp]; columns beyond `vocab_size` are padding and get no probability.
    `labels` is [s, b], global ids. The result is the same on all tp ranks.
    """
    return _CrossEntropy.apply(logits, labels, tp, vocab_size)


def masked_sum(losses: Tensor, mask: Tensor, by_source: Tensor | None = None) -> Tensor:
    """Return the sum of the losses whose mask is not 0; other losses may have any value, even NaN.

    With several data sources, a mask that is not 0 is 1 + the index of the token's source.
    `by_source` [sources] then receives the sum of each source.
    """
    kept = losses.masked_fill(mask == 0, 0)
    if by_source is not None:
        sources = torch.arange(1, len(by_source) + 1, device=mask.device)
        chosen = mask.flatten() == sources.unsqueeze(1)
        by_source.copy_(torch.where(chosen, kept.detach().flatten(), 0).sum(1))
    return kept.sum()
