"""Rules that update each weight from its own gradient and state alone: AdamW, Adam, SGD, Lion.

They run on any cut of a bucket. Where torch has the rule, its fused kernel does the work.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from megapipe.config import update_rules
from megapipe.config.config import OptimizerConfig
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
    decoupled: ClassVar[bool] = False

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        adam_step(self.kernel, part, lr, count, self.config, decoupled=self.decoupled)

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """m^ / (sqrt(v^) + eps), and the decay where it is decoupled."""
        step = corrected_ratio(states, count, self.config, eps=self.config.eps)
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
    config: OptimizerConfig,
    *,
    decoupled: bool,
) -> None:
    """An Adam step on one part, whose states are exp_avg and exp_avg_sq."""
    now = AdamStep(
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        weight_decay=part.weight_decay,
        decoupled=decoupled,
        step=count + 1,
    )
    exp_avg, exp_avg_sq = part.states
    kernel(part.master, part.grad, exp_avg, exp_avg_sq, now)


def corrected_ratio(
    states: Sequence[Tensor], count: int, config: OptimizerConfig, *, eps: float
) -> Tensor:
    """m^ / (sqrt(v^) + eps) of the states, a mean m and a mean square v [n] after `count` steps,
    corrected for their beginning at 0."""
    mean, square = states
    root = torch.sqrt(square / (1.0 - config.beta2**count)).add_(eps)
    return torch.div(mean, root, out=root).div_(1.0 - config.beta1**count)


class SGD(Elementwise):
    """Gradient descent with momentum, undamped; weight decay is added to the gradient."""

    declaration = update_rules.SGD

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        sgd(
            [part.master],
            [part.grad],
            list(part.states),
            fused=True,
            weight_decay=part.weight_decay,
            momentum=self.config.momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self.config.nesterov,
            maximize=False,
        )

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """The momentum, which a step goes along, Nesterov's in the limit of equal gradients."""
        return states[0]


class Lion(Elementwise):
    """The sign of an interpolated momentum, with decoupled decay (Chen et al., 2302.06675)."""

    declaration = update_rules.LION

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        for master, grad, (exp_avg,), weight_decay in part.blocks():
            direction = exp_avg.lerp(grad, 1.0 - self.config.beta1).sign_()
            master.mul_(1.0 - lr * weight_decay).add_(direction, alpha=-lr)
            exp_avg.lerp_(grad, 1.0 - self.config.beta2)

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """The sign of the momentum, and the decay."""
        return states[0].sign().add_(master, alpha=weight_decay)
