"""Cross-entropy over a vocabulary split by tp, without ever gathering the logits.

Each rank has the logits of its range of the vocabulary. Three numbers per token are exchanged: the
maximum, the sum of exponentials, and the logit of the label (Shoeybi et al., 1909.08053). Each
rank takes its exponentials against its own maximum, so one all-gather brings all three.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.distributed.collectives import all_gather
from megapipe.distributed.mesh import Axis


class Exponentials(NamedTuple):
    """The exponentials that replace logits [..., V/tp], and factors that make gradients of them."""

    values: Tensor  # [..., V/tp], each exp(logit - this rank's maximum)
    factor: Tensor  # [...], values x factor are the probabilities
    column: Tensor  # [..., 1], the label's column, 0 where it is another rank's
    own: Tensor  # [..., 1], 1 where the label is this rank's, else 0

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the logits, in place of `values`, for `grad` [...] of the losses."""
        out = self.values.mul_((self.factor * grad).unsqueeze(-1))
        return out.scatter_add_(-1, self.column, -self.own * grad.unsqueeze(-1))


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which losses of logits of `dtype` are computed: fp32, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def exponentiate(
    logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int
) -> tuple[Tensor, Exponentials]:
    """Losses [...] in nats, the same on all tp ranks; `logits` are replaced by exponentials.

    `logits` [..., V/tp] are this rank's, in :func:`loss_dtype`; columns beyond `vocab_size` are
    padding and get no probability. `labels` [...] are global ids. One collective, of three numbers
    per token.
    """
    local = logits.shape[-1]
    first = tp.index * local
    if first + local > vocab_size:
        logits[..., max(0, vocab_size - first) :] = float("-inf")
    column = (labels - first).unsqueeze(-1)
    elsewhere = (column < 0) | (column >= local)
    column = column.masked_fill(elsewhere, 0)
    target = logits.gather(-1, column).masked_fill(elsewhere, 0).squeeze(-1)
    # where a rank holds padding alone all are -inf, and -inf - -inf is no number
    top = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    values = logits.sub_(top.unsqueeze(-1)).exp_()
    here = torch.stack((top, values.sum(-1), target))  # [3, ...]
    tops, sums, targets = all_gather(here, tp).unflatten(0, (tp.size, 3)).unbind(1)  # [tp, ...]
    highest = tops.amax(0)
    total = (sums * (tops - highest).exp()).sum(0)
    losses = highest - targets.sum(0) + total.log()
    factor = (top - highest).exp() / total
    own = (~elsewhere).to(logits.dtype)
    return losses, Exponentials(values, factor, column, own)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int) -> Tensor:
        x = logits.to(loss_dtype(logits.dtype), copy=True)
        losses, exponentials = exponentiate(x, labels, tp, vocab_size)
        ctx.save_for_backward(*exponentials)
        ctx.dtype = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        # the graph is walked once, so its largest array is reused
        return Exponentials(*ctx.saved_tensors).gradient(grad).to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int
) -> Tensor:
    """Loss of each token in nats, [s, b], in fp32 (fp64 for fp64).

    `logits` is [s, b, V/tp], columns beyond `vocab_size` are padding and get no probability;
    `labels` is [s, b], global ids. The result is the same on all tp ranks.
    """
    return _CrossEntropy.apply(logits, labels, tp, vocab_size)


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Sum of the losses whose mask is not 0; masked losses may have any value, NaN included."""
    return losses.masked_fill(mask == 0, 0).sum()
