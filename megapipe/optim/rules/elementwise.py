"""Rules that update each weight from its own gradient and state: AdamW, Adam, SGD, Lion.

The rules work on any range of a bucket. If torch has a fused kernel for a rule, the rule uses it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megapipe.config import update_rules
from megapipe.config.update_rules import AdamOptions
from megapipe.ops.adam import AdamKernel, AdamStep
from megapipe.optim.rules.rule import Rule, StateSlice, ranges

if TYPE_CHECKING:
    from megapipe.optim.shard import Shard


class Elementwise(Rule):
    """A rule whose :meth:`update` changes one part of a shard, independently of all others."""

    def step(self, shards: Sequence[Shard], lr: float, count: int) -> None:
        for shard in shards:
            for part in self.parts(shard, ranges(shard)):
                self.update(part, lr, count)

    @abstractmethod
    def update(self, part: StateSlice, lr: float, count: int) -> None: ...


class Adam(Elementwise):
    """Adam (Kingma and Ba, 1412.6980); weight decay is added to the gradient."""

    declaration = update_rules.ADAM
    options: AdamOptions
    decoupled: ClassVar[bool] = False

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        adam_step(self.kernel, part, lr, count, self.options, decoupled=self.decoupled)

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return m^ / (sqrt(v^) + eps), plus the weight decay if it is decoupled."""
        step = corrected_ratio(states, count, self.options.betas, eps=self.options.eps)
        return step.add_(master, alpha=weight_decay) if self.decoupled else step


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 1711.05101)."""

    declaration = update_rules.ADAMW
    decoupled = True


def adam_step(
    kernel: AdamKernel,
    part: StateSlice,
    lr: float,
    count: int,
    options: AdamOptions,
    *,
    decoupled: bool,
) -> None:
    """Take an Adam step on one part, whose states are exp_avg and exp_avg_sq."""
    now = AdamStep(
        lr=lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        eps=options.eps,
        weight_decay=part.weight_decay,
        decoupled=decoupled,
        step=count + 1,
    )
    exp_avg, exp_avg_sq = part.states
    kernel(part.master, part.grad, exp_avg, exp_avg_sq, now)


def corrected_ratio(
    states: Sequence[Tensor], count: int, betas: Sequence[float], *, eps: float
) -> Tensor:
    """Return m^ / (sqrt(v^) + eps) for `states` [n]: a mean m and a mean square v after `count`
    steps, corrected for their start at 0."""
    mean, square = states
    beta1, beta2 = betas
    root = torch.sqrt(square / (1.0 - beta2**count)).add_(eps)
    return torch.div(mean, root, out=root).div_(1.0 - beta1**count)


class SGD(Elementwise):
    """Gradient descent with undamped momentum; weight decay is added to the gradient."""

    declaration = update_rules.SGD
    options: update_rules.SGDOptions

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        sgd(
            [part.master],
            [part.grad],
            list(part.states),
            fused=True,
            weight_decay=part.weight_decay,
            momentum=self.options.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.options.nesterov,
            maximize=False,
        )

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return the momentum. With Nesterov it is the direction only if gradients are constant."""
        return states[0]


class Lion(Elementwise):
    """Lion (Chen et al., 2302.06675): sign of an interpolated momentum, with decoupled decay."""

    declaration = update_rules.LION
    options: update_rules.LionOptions

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        beta1, beta2 = self.options.betas
        for master, grad, (exp_avg,), weight_decay in part.blocks():
            direction = exp_avg.lerp(grad, 1.0 - beta1).sign_()
            master.mul_(1.0 - lr * weight_decay).add_(direction, alpha=-lr)
            exp_avg.lerp_(grad, 1.0 - beta2)

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return the sign of the momentum, plus the weight decay."""
        return states[0].sign().add_(master, alpha=weight_decay)
