"""The arithmetic of the loss between its GEMMs: torch's operations, or kernels made by inductor.

Each tensor-parallel rank has the logits of its range of the vocabulary. A rank takes exponentials
relative to its local maximum, so ranks exchange only three values per token (Shoeybi et al.,
1909.08053): maximum, sum of exponentials, and logit of the label. A kernel computes these *vocab
stats* [3, n], and from the stats of all ranks, [tp, 3, n], the losses and the gradient of the
logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megapipe.ops.compiler import compile_elementwise, needs_inductor
from megapipe.ops.probe import Candidate, agree, in_preference, small_data


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which losses of logits of `dtype` are computed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class Labels(NamedTuple):
    """Labels of n tokens, and their columns in this rank's range of the vocabulary."""

    column: Tensor
    """Column of each label, [n, 1] int64; 0 if the label is in another rank's range."""
    elsewhere: Tensor
    """[n, 1] bool: whether the label is in another rank's range."""
    columns: int
    """Number of this rank's logit columns that are not padding; padding gets no probability."""
    tp_index: int

    @classmethod
    def of(cls, labels: Tensor, width: int, tp_index: int, vocab_size: int) -> Labels:
        """Build labels from ids [n], for rank `tp_index`; every rank has `width` logit columns."""
        first = tp_index * width
        column = (labels - first).unsqueeze(-1)
        elsewhere = (column < 0) | (column >= width)
        columns = max(0, min(vocab_size - first, width))
        return cls(column.masked_fill(elsewhere, 0), elsewhere, columns, tp_index)

    def some(self, tokens: slice) -> Labels:
        return self._replace(column=self.column[tokens], elsewhere=self.elsewhere[tokens])


class LossKernel(Protocol):
    """Kernel of a loss chunk, in two steps; both may overwrite `logits` [n, V/tp]."""

    @property
    def wide(self) -> bool:
        """Whether the kernel takes logits in :func:`loss_dtype`, instead of in the model's type."""

    def local_stats(self, logits: Tensor, labels: Labels) -> Tensor:
        """Return this rank's vocab stats [3, n]: maxima, exponential sums and logits of labels."""

    def results(
        self, logits: Tensor, labels: Labels, gathered: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the losses [n] in nats, and the gradient of the logits [n, V/tp] for the sum of
        the losses times `weights` [n]. Call it after :meth:`local_stats` on the same logits;
        `gathered` [tp, 3, n] has the vocab stats of all tp ranks."""


class VocabStats(NamedTuple):
    """Statistics over the whole vocabulary."""

    losses: Tensor
    """Loss of each token, [n], in nats."""
    factor: Tensor
    """[n]: factor that turns this rank's exponentials into probabilities."""


def merge_vocab_stats(gathered: Tensor, tp_index: int) -> VocabStats:
    """Merge vocab stats of all tp ranks, [tp, 3, n], into losses, with rank `tp_index`'s factor."""
    tops, sums, targets = gathered.unbind(1)
    highest = tops.amax(0)
    total = (sums * (tops - highest).exp()).sum(0)
    factor = (tops[tp_index] - highest).exp() / total
    return VocabStats(highest - targets.sum(0) + total.log(), factor)


class TorchLoss:
    """Loss kernel of torch's operations; :meth:`local_stats` turns the logits into exponentials."""

    wide = True

    def local_stats(self, logits: Tensor, labels: Labels) -> Tensor:
        if labels.columns < logits.shape[-1]:
            logits[:, labels.columns :] = float("-inf")
        target = logits.gather(-1, labels.column).masked_fill(labels.elsewhere, 0).squeeze(-1)
        # if a rank has only padding, all are -inf, and -inf - -inf is NaN
        top = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
        values = logits.sub_(top.unsqueeze(-1)).exp_()
        return torch.stack((top, values.sum(-1), target))

    def results(
        self, logits: Tensor, labels: Labels, gathered: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses, factor = merge_vocab_stats(gathered, labels.tp_index)
        return losses, gradient(logits, labels, factor, weights)


def gradient(exponentials: Tensor, labels: Labels, factor: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the logits [n, V/tp] for the sum of the losses times `weights` [n], in
    the memory of this rank's exponentials."""
    out = exponentials.mul_((factor * weights).unsqueeze(-1))
    own = weights.unsqueeze(-1).masked_fill(labels.elsewhere, 0)
    return out.scatter_add_(-1, labels.column, -own)


class InductorLoss:
    """Loss kernel whose two steps inductor compiles; logits keep their type and are read twice."""

    wide = False

    def __init__(self) -> None:
        self._shares = compile_elementwise(_shares)
        self._results = compile_elementwise(_results)

    def local_stats(self, logits: Tensor, labels: Labels) -> Tensor:
        return self._shares(logits, labels.column, labels.elsewhere, labels.columns)

    def results(
        self, logits: Tensor, labels: Labels, gathered: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        losses = self._results(
            logits, labels.column, labels.elsewhere, labels.columns, gathered, weights
        )
        return losses, logits


def _shares(logits: Tensor, column: Tensor, elsewhere: Tensor, columns: int) -> Tensor:
    x, is_label = _read(logits, column, elsewhere, columns)
    top = x.amax(-1).clamp(min=torch.finfo(x.dtype).min)
    total = (x - top.unsqueeze(-1)).exp().sum(-1)
    return torch.stack((top, total, torch.where(is_label, x, 0).sum(-1)))


def _results(
    logits: Tensor,
    column: Tensor,
    elsewhere: Tensor,
    columns: int,
    gathered: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return the losses, and overwrite the logits with their gradient."""
    tops, sums, targets = gathered.unbind(1)
    highest = tops.amax(0)
    log_total = highest + (sums * (tops - highest).exp()).sum(0).log()
    x, is_label = _read(logits, column, elsewhere, columns)
    share = (x - log_total.unsqueeze(-1)).exp() - is_label.to(x.dtype)
    logits.copy_(share * weights.unsqueeze(-1))
    return log_total - targets.sum(0)


def _read(logits: Tensor, column: Tensor, elsewhere: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the logits in :func:`loss_dtype`, with padding at -inf, and a mask of the labels."""
    x = logits.to(loss_dtype(logits.dtype))
    at = torch.arange(x.shape[-1], device=x.device)
    if columns < x.shape[-1]:
        x = torch.where(at < columns, x, float("-inf"))
    return x, (at == column) & ~elsewhere


def candidates(*, device: torch.device, dtype: torch.dtype) -> list[Candidate[LossKernel]]:
    """Return the kernels by preference: on a GPU inductor's, then torch's; on a CPU torch's
    first."""

    def inductor() -> LossKernel:
        needs_inductor(device)
        return InductorLoss()

    def results(kernel: LossKernel, precision: torch.dtype) -> Sequence[Tensor]:
        logits, weights = (
            x.detach() for x in small_data([(6, 200), (6,)], dtype, precision, device)
        )
        labels = Labels.of(torch.arange(-40, 200, 40, device=device), 200, 0, 190)
        work = logits.to(loss_dtype(logits.dtype)) if kernel.wide else logits.clone()
        gathered = kernel.local_stats(work, labels).unsqueeze(0)
        return kernel.results(work, labels, gathered, weights.to(gathered.dtype))

    def check(kernel: LossKernel) -> None:
        agree(kernel, TorchLoss(), results, dtype)

    found = [
        Candidate[LossKernel]("inductor", inductor, check),
        Candidate[LossKernel]("torch", TorchLoss),
    ]
    return in_preference(found, device)
