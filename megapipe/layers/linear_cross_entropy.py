"""Head and cross-entropy in one, a loss chunk of tokens at a time.

The logits of a micro-batch, [tokens, V/tp] in fp32, are the largest tensor of the model. With loss
chunks, the logits of only one loss chunk exist at a time. The gradient of the logits follows from
the logits alone. So one pass over the loss chunks computes logits, losses, the gradient of the
logits, and the gradients of the hidden states and of the weight (Liger does so in the forward, Hsu
et al., 2410.10989). The pass takes three GEMMs, as without loss chunks.

The pass is part of the *backward*: the loss is not needed before the step ends, and the gradient of
the loss and the main gradients exist only in the backward. The forward saves the hidden states and
computes nothing. The price: the weight gradient is computed in ``I``, not in ``W``, since it needs
the logits, which are freed with the loss chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from megapipe.distributed.collectives import all_gather
from megapipe.layers.activation_policy import loss_chunk
from megapipe.layers.cross_entropy import gather_vocab_stats, masked_sum
from megapipe.layers.linear import ColumnParallelLinear, start_sum
from megapipe.layers.weight_grad import add_product
from megapipe.ops.loss import Labels, LossKernel, loss_dtype, merge_vocab_stats


class _Chunk(NamedTuple):
    """A loss chunk of n tokens: hidden states `x` [n, h], and what losses and gradients need."""

    tokens: slice
    x: Tensor
    logits: Tensor
    """Buffer of the logits, [n, V/tp]; :meth:`LossKernel.local_stats` may have overwritten them."""
    labels: Labels
    gathered: Tensor
    """Vocab stats (:mod:`megapipe.ops.loss`) of all tp ranks, [tp, 3, n]."""
    scratch: Tensor
    """Buffer [n, V/tp] in the model's dtype; the same tensor as `logits` if that has this dtype."""
    slope: Tensor | None
    """Derivative of the soft cap, [n, V/tp], a factor of the gradient; None: no soft cap."""


@dataclass(frozen=True)
class _Loss:
    """Loss of one micro-batch: the head, labels [s, b], mask [s, b], and at most `chunk` tokens in
    a loss chunk; see :func:`linear_cross_entropy`."""

    head: ColumnParallelLinear
    labels: Tensor
    mask: Tensor
    vocab_size: int
    chunk: int
    by_source: Tensor | None = None
    softcap: float | None = None

    def whole(self, hidden: Tensor) -> Tensor:
        """Gather the hidden states of all positions: [s(/tp), b, h] -> [s * b, h]."""
        sharding = self.head.sharding
        x = all_gather(hidden, sharding.tp) if sharding.sequence_split else hidden
        return x.flatten(0, 1)

    def chunks(self, x: Tensor) -> Iterator[_Chunk]:
        """Yield the loss chunks of x [s * b, h] in order; all use the same memory."""
        matrix, tp, kernel = self.head.matrix(), self.head.sharding.tp, self.kernel
        size = loss_chunk(len(x), self.chunk)
        scratch = x.new_empty(size, len(matrix))
        labels = Labels.of(self.labels.flatten(), len(matrix), tp.index, self.vocab_size)
        high = loss_dtype(x.dtype) if kernel.wide else x.dtype
        logits = scratch if high == x.dtype else torch.empty_like(scratch, dtype=high)
        for start in range(0, len(x), size):
            tokens = slice(start, min(start + size, len(x)))
            n, here = tokens.stop - start, labels.some(tokens)
            torch.mm(x[tokens], matrix.t(), out=scratch[:n])
            if logits is not scratch:
                logits[:n].copy_(scratch[:n])
            slope = self._cap(logits[:n])
            gathered = gather_vocab_stats(kernel.local_stats(logits[:n], here), tp)
            yield _Chunk(tokens, x[tokens], logits[:n], here, gathered, scratch[:n], slope)

    def _cap(self, logits: Tensor) -> Tensor | None:
        """Soft-cap logits in place; return the derivative, or None without a soft cap."""
        if self.softcap is None:
            return None
        shares = logits.div_(self.softcap).tanh_()
        slope = shares.square().neg_().add_(1)
        shares.mul_(self.softcap)
        return slope

    @property
    def kernel(self) -> LossKernel:
        return self.head.sharding.kernels.loss

    def total(self, losses: list[Tensor]) -> Tensor:
        return masked_sum(torch.cat(losses), self.mask.flatten(), self.by_source)

    @torch.no_grad()
    def forward(self, hidden: Tensor) -> Tensor:
        """Return the sum of the unmasked losses."""
        index = self.head.sharding.tp.index
        chunks = self.chunks(self.whole(hidden))
        return self.total([merge_vocab_stats(chunk.gathered, index).losses for chunk in chunks])

    def backward(self, hidden: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the unmasked losses, and the gradient of `hidden`. `grad` [] is the
        gradient of the sum.

        Add the gradient of the weight to its main gradient, unless the weight is frozen.
        """
        sharding, weight = self.head.sharding, self.head.weight
        matrix, x = self.head.matrix(), self.whole(hidden)
        weights = (self.mask != 0).flatten() * grad  # [s * b]
        grad_x, losses = torch.empty_like(x), []  # partial sums over tp
        for chunk in self.chunks(x):
            some, g = self.kernel.results(
                chunk.logits, chunk.labels, chunk.gathered, weights[chunk.tokens]
            )
            losses.append(some)
            if chunk.slope is not None:
                g = g.mul_(chunk.slope)
            if g.dtype != x.dtype:
                g = chunk.scratch.copy_(g)
            torch.mm(g, matrix, out=grad_x[chunk.tokens])
            if chunk.tokens.stop == len(x):
                grad_hidden, summed = start_sum(grad_x.view(-1, *hidden.shape[1:]), sharding)
            if not self.head.frozen:
                add_product(weight, g, chunk.x, sharding.kernels.accumulate)
        summed()
        return self.total(losses), grad_hidden


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Parameter, loss: _Loss) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.loss = loss
        total = hidden.new_full((), float("nan"), dtype=loss_dtype(hidden.dtype))
        ctx.total = total.detach()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (hidden,) = ctx.saved_tensors
        total, grad_hidden = ctx.loss.backward(hidden, grad)
        ctx.total.copy_(total)
        return grad_hidden, None, None


def linear_cross_entropy(
    hidden: Tensor,
    head: ColumnParallelLinear,
    labels: Tensor,
    mask: Tensor,
    *,
    vocab_size: int,
    chunk: int,
    by_source: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return the sum of the unmasked token losses in nats, [], in fp32 (fp64 for fp64).

    `hidden` is [s(/tp), b, h]; `labels`, global ids, and `mask` are [s, b]. The logits of at most
    `chunk` tokens exist at a time (:func:`~megapipe.layers.activation_policy.loss_chunk`). With
    `softcap`, logits become softcap * tanh(logits / softcap). Over tp there is one small all-gather
    per chunk, and one reduction of the gradient of `hidden`. If gradients are enabled, the result
    is NaN until the backward, which computes loss and gradients together. At the same time
    `by_source` [n] receives the sums of the losses whose mask is 1, 2, ..., n.
    """
    loss = _Loss(head, labels, mask, vocab_size, chunk, by_source, softcap)
    if not torch.is_grad_enabled():
        return loss.forward(hidden)
    return _LinearCrossEntropy.apply(hidden, head.weight, loss)
