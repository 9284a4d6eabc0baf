"""Cross-entropy over a vocabulary split by tp, without ever gathering the logits.

Each rank has the logits of its range of the vocabulary. Three numbers per token are reduced: the
maximum, the sum of exponentials, and the logit of the label (Shoeybi et al., 1909.08053).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megapipe.mesh import Axis
from megapipe.tensor_parallel.collectives import all_reduce, all_reduce_max


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int) -> Tensor:
        local = logits.shape[-1]
        first = tp.index * local
        x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        if first + local > vocab_size:
            x[..., max(0, vocab_size - first) :] = float("-inf")
        top = all_reduce_max(x.amax(-1), tp)  # [s, b]
        x -= top.unsqueeze(-1)
        row = labels - first
        elsewhere = (row < 0) | (row >= local)
        row = row.masked_fill(elsewhere, 0).unsqueeze(-1)
        target = x.gather(-1, row).squeeze(-1).masked_fill(elsewhere, 0)
        all_reduce(target, tp)
        total = all_reduce(x.exp_().sum(-1), tp)
        x /= total.unsqueeze(-1)  # softmax, [s, b, V/tp]
        ctx.save_for_backward(x, row, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, row, elsewhere = ctx.saved_tensors
        own = (~elsewhere).to(softmax.dtype).unsqueeze(-1)
        g = grad.unsqueeze(-1)
        out = softmax.mul_(g)  # the graph is walked once, so its largest array is reused
        out.scatter_add_(-1, row, -own * g)
        return out.to(ctx.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, tp: Axis, vocab_size: int
) -> Tensor:
    """Loss of each token in nats, [s, b], in fp32 (fp64 for fp64).

    `logits` is [s, b, V/tp], columns beyond `vocab_size` are padding and get no probability;
    `labels` is [s, b], global ids. The result is the same on all tp ranks.
    """
    return _CrossEntropy.apply(logits, labels, tp, vocab_size)
