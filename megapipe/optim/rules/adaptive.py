"""Elementwise rules with adaptive step sizes, besides Adam: RMSprop, NAdamW, AdaBelief, Adam3.

RMSprop and NAdamW call torch. All rules work block by block, so that temporaries are small.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.nadam import nadam
from torch.optim.rmsprop import rmsprop

from megapipe.config import update_rules
from megapipe.optim.rules.elementwise import Elementwise, corrected_ratio
from megapipe.optim.rules.rule import StateSlice

NO_MORE = 2.0**-60
"""Product of momenta that is negligible: below it, 1 - product is 1 in floating point."""


class RMSprop(Elementwise):
    """Gradients divided by their root mean square, with momentum (Tieleman and Hinton, 2012).

    Weight decay is added to the gradient.
    """

    declaration = update_rules.RMSPROP
    options: update_rules.RMSpropOptions

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        for master, grad, (square_avg, *momentum), weight_decay in part.blocks():
            rmsprop(
                [master],
                [grad],
                [square_avg],
                [],
                momentum,
                [torch.full((), float(count))],
                foreach=True,
                lr=lr,
                alpha=self.options.alpha,
                eps=self.options.eps,
                weight_decay=weight_decay,
                momentum=self.options.momentum,
                centered=False,
            )

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return the momentum."""
        return states[1]


class NAdamW(Elementwise):
    """Adam with Nesterov's momentum (Dozat, 2016) and decoupled weight decay."""

    declaration = update_rules.NADAMW
    options: update_rules.NAdamWOptions

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        product = self._product(count)
        for master, grad, (exp_avg, exp_avg_sq), weight_decay in part.blocks():
            nadam(
                [master],
                [grad],
                [exp_avg],
                [exp_avg_sq],
                [torch.full((), product, dtype=torch.float64)],
                [torch.full((), float(count))],
                foreach=True,
                decoupled_weight_decay=True,
                beta1=self.options.betas[0],
                beta2=self.options.betas[1],
                lr=lr,
                weight_decay=weight_decay,
                momentum_decay=self.options.momentum_decay,
                eps=self.options.eps,
            )

    def _product(self, count: int) -> float:
        """Return the product of the momenta of steps 1 .. `count`, for torch's bias correction."""
        product = 1.0
        for step in range(1, count + 1):
            decayed = 0.96 ** (step * self.options.momentum_decay)
            product *= self.options.betas[0] * (1 - 0.5 * decayed)
            if product < NO_MORE:
                break
        return product

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return Adam's direction for the current moments: m^ / (sqrt(v^) + eps)."""
        return corrected_ratio(states, count, self.options.betas, eps=self.options.eps)


class _ByMeans(Elementwise):
    """Base of variants of AdamW with a different second moment. Each step adds eps to it."""

    options: update_rules.AdamOptions

    @abstractmethod
    def squared(self, grad: Tensor, mean: Tensor) -> Tensor:
        """Return the vector whose square enters the second moment. `mean`: the first moment, which
        already includes `grad`."""

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        (beta1, beta2), eps = self.options.betas, self.options.eps
        for master, grad, (mean, second), weight_decay in part.blocks():
            mean.lerp_(grad, 1.0 - beta1)
            values = self.squared(grad, mean)
            second.mul_(beta2).addcmul_(values, values, value=1.0 - beta2).add_(eps)
            step = self.direction(master, (mean, second), weight_decay, count + 1)
            master.mul_(1.0 - lr * weight_decay).add_(step, alpha=-lr)


class AdaBelief(_ByMeans):
    """Adam with the gradient's variance around its mean as second moment (Zhuang et al.,
    2010.07468)."""

    declaration = update_rules.ADABELIEF

    def squared(self, grad: Tensor, mean: Tensor) -> Tensor:
        return grad.sub_(mean)

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return m^ / (sqrt(s^) + eps)."""
        return corrected_ratio(states, count, self.options.betas, eps=self.options.eps)


class Adam3(_ByMeans):
    """Adam with the square of the mean gradient as second moment: AdaM3 (ICDM 2023).

    AdaMomentum (Wang et al., 2106.11514) has the same formula.
    """

    declaration = update_rules.ADAM3

    def squared(self, grad: Tensor, mean: Tensor) -> Tensor:
        return mean

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Return m^ / sqrt(v^), or 0 in vocabulary padding, where v is 0 in a resumed run."""
        least = torch.finfo(master.dtype).tiny  # smaller than any other root, so exact
        return corrected_ratio(states, count, self.options.betas, eps=least)
