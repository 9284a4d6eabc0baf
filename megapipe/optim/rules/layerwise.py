"""LARS and LAMB: the step of a parameter is scaled by a ratio of norms, its trust ratio.

A norm covers a whole parameter, or each expert in it. So squares are summed over the shards of a
bucket and over the tensor-parallel parts: one fp64 vector of squares per bucket over the shard
axis, and one for all buckets over tp (over etp for experts). As in the usual implementations,
parameters without weight decay (norms, biases) have ratio 1, and so does a parameter whose norm is
0. Vocabulary padding is zero and adds nothing to a norm.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megapipe.config import update_rules
from megapipe.distributed.collectives import all_gather, all_reduce
from megapipe.distributed.mesh import Axis
from megapipe.optim.buffers import ParamRange
from megapipe.optim.norm import squared_norm
from megapipe.optim.rules.rule import Rule, StateSlice, overlap, ranges

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard


class TrustRatio(Rule):
    """A rule that passes over the shards twice: for directions and their norms, then to update."""

    def step(self, shards: Sequence[Shard], lr: float, count: int) -> None:
        if not shards:  # everything in a stage is frozen, on all its tp ranks
            return
        for over_ep in (False, True):
            alike = [shard for shard in shards if shard.bucket.over_ep == over_ep]
            if alike:
                self._step(alike, lr, count)

    def _step(self, shards: Sequence[Shard], lr: float, count: int) -> None:
        """Update shards whose tensors are all split over tp, or all over etp."""
        squares = [self._squares(shard, count) for shard in shards]
        norms = _summed(torch.cat(squares), shards[0].tp).sqrt()  # [parameters of all shards, 2]
        weight, direction = norms.unbind(1)
        ratio = self.ratio(weight, direction)
        ratio = ratio.where((weight > 0) & (direction > 0), 1.0)
        for shard, ratios in zip(shards, ratio.split([len(s) for s in squares]), strict=True):
            for index, entry, part in self._parameters(shard):
                scale = lr * ratios[index] if entry.spec.decay else lr
                self.apply(part, scale)

    def _squares(self, shard: Shard, count: int) -> Tensor:
        """Return [parameters, 2]: squared norms of each parameter's weights and of its step's
        direction, summed over the bucket's shards."""
        parameters = sum(_count(entry) for entry in shard.bucket.entries)
        squares = torch.zeros(parameters, 2, dtype=torch.float64, device=shard.grad.device)
        for index, entry, part in self._parameters(shard):
            self.prepare(part, count)
            if entry.spec.decay and entry.spec.is_primary:
                for column, values in enumerate((part.master, part.grad)):
                    squares[index, column] += squared_norm(values)
        return all_reduce(squares, shard.axis)

    def _parameters(self, shard: Shard) -> Iterator[tuple[int, ParamRange, StateSlice]]:
        """Yield the parameters that overlap the shard, each in one or more blocks.

        State windows are made from ranges, not from parameters: stochastic rounding draws random
        numbers for whole tiles, and long ranges use most of these numbers.
        """
        for range_ in ranges(shard):
            start = range_.start
            for part in self.parts(shard, [range_]):
                stop = start + len(part.master)
                for index, entry in enumerate(chain(*map(_each, shard.bucket.entries))):
                    here = overlap(shard, entry)
                    a, b = max(here.start, start), min(here.stop, stop)
                    if a < b:
                        for block in part.cut(a - start, b - start).blocks():
                            yield index, entry, block
                start = stop

    @abstractmethod
    def prepare(self, part: StateSlice, count: int) -> None:
        """Replace the gradient in `part` by the step's direction; master weights do not change."""

    @abstractmethod
    def ratio(self, weight: Tensor, direction: Tensor) -> Tensor:
        """Return trust ratios, fp64 [parameters], from the norms of weights and directions."""

    @abstractmethod
    def apply(self, part: StateSlice, scale: Tensor | float) -> None:
        """Update a part of a prepared parameter; `scale` is learning rate x trust ratio."""


def _summed(squares: Tensor, tp: Axis) -> Tensor:
    """Return the sum of `squares` [n, 2] over tp, added in rank order.

    The rounding of an all-reduce depends on a value's position in the vector. Stages that share a
    tied embedding have its squares at different positions, so its weights would differ.
    """
    first, *others = all_gather(squares.unsqueeze(0), tp)  # [tp, n, 2]
    total = first.clone()
    for other in others:
        total += other
    return total


def _count(entry: ParamRange) -> int:
    """Return the number of trust ratios of a parameter: one per local expert, else one."""
    return entry.spec.sizes[0] if entry.spec.over_ep else 1


def _each(entry: ParamRange) -> Iterator[ParamRange]:
    """Yield the range of each local expert of a parameter, or the whole range if it has none."""
    length = entry.spec.numel // _count(entry)
    for start in range(entry.start, entry.stop, length):
        yield ParamRange(entry.spec, start, start + length)


class LARS(TrustRatio):
    """Momentum of layer-wise scaled gradients (You et al., 1708.03888)."""

    declaration = update_rules.LARS
    options: update_rules.LARSOptions

    def prepare(self, part: StateSlice, count: int) -> None:
        """Do nothing: the direction is the gradient itself."""

    def ratio(self, weight: Tensor, direction: Tensor) -> Tensor:
        decayed = direction + self.config.weight_decay * weight
        return self.options.trust_coefficient * weight / decayed

    def apply(self, part: StateSlice, scale: Tensor | float) -> None:
        (momentum,) = part.states
        step = part.grad.add_(part.master, alpha=part.weight_decay).mul_(scale)
        momentum.mul_(self.options.momentum).add_(step)
        part.master.sub_(momentum)


class LAMB(TrustRatio):
    """Adam's direction with decay, scaled to the norm of the weights (You et al., 1904.00962)."""

    declaration = update_rules.LAMB
    options: update_rules.AdamOptions

    def prepare(self, part: StateSlice, count: int) -> None:
        exp_avg, exp_avg_sq = part.states
        beta1, beta2 = self.options.betas
        exp_avg.lerp_(part.grad, 1.0 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(part.grad, part.grad, value=1.0 - beta2)
        root = (exp_avg_sq / (1.0 - beta2 ** (count + 1))).sqrt_().add_(self.options.eps)
        torch.div(exp_avg, root, out=part.grad)
        part.grad.div_(1.0 - beta1 ** (count + 1)).add_(part.master, alpha=part.weight_decay)

    def ratio(self, weight: Tensor, direction: Tensor) -> Tensor:
        return weight / direction

    def apply(self, part: StateSlice, scale: Tensor | float) -> None:
        part.master.sub_(part.grad.mul_(scale))
