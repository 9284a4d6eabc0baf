"""Elementwise rules that scale each weight's step, beside Adam: RMSprop, NAdamW, AdaBelief, Adam3.

RMSprop and NAdamW are torch's. All go block by block, so that temporaries are small.
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
"""A product that changes no digit of 1 any more."""


class RMSprop(Elementwise):
    """Gradients by the root of their mean square, with momentum (Tieleman and Hinton, 2012).

    Weight decay is added to the gradient.
    """

    declaration = update_rules.RMSPROP

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
                alpha=self.config.beta2,
                eps=self.config.eps,
                weight_decay=weight_decay,
                momentum=self.config.momentum,
                centered=False,
            )

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """The momentum."""
        return states[1]


class NAdamW(Elementwise):
    """Adam with Nesterov's momentum (Dozat, 2016) and decoupled weight decay."""

    declaration = update_rules.NADAMW

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
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                lr=lr,
                weight_decay=weight_decay,
                momentum_decay=self.config.momentum_decay,
                eps=self.config.eps,
            )

    def _product(self, count: int) -> float:
        """Product of the momenta of the steps 1 .. `count`, by which torch corrects the bias."""
        product = 1.0
        for step in range(1, count + 1):
            product *= self.config.beta1 * (1 - 0.5 * 0.96 ** (step * self.config.momentum_decay))
            if product < NO_MORE:
                break
        return product

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """Adam's, of the moments as they are: m^ / (sqrt(v^) + eps)."""
        return corrected_ratio(states, count, self.config, eps=self.config.eps)


class _ByMeans(Elementwise):
    """Adam with another second moment, to which eps is added at each step, and decoupled weight
    decay."""

    @abstractmethod
    def squared(self, grad: Tensor, mean: Tensor) -> Tensor:
        """The vector whose square the second moment averages; `mean` has the gradient in it."""

    def update(self, part: StateSlice, lr: float, count: int) -> None:
        beta1, beta2, eps = self.config.beta1, self.config.beta2, self.config.eps
        for master, grad, (mean, second), weight_decay in part.blocks():
            mean.lerp_(grad, 1.0 - beta1)
            values = self.squared(grad, mean)
            second.mul_(beta2).addcmul_(values, values, value=1.0 - beta2).add_(eps)
            step = self.direction(master, (mean, second), weight_decay, count + 1)
            master.mul_(1.0 - lr * weight_decay).add_(step, alpha=-lr)


class AdaBelief(_ByMeans):
    """Adam with the variance of the gradient around its mean in place of its square (Zhuang et
    al., 2010.07468)."""

    declaration = update_rules.ADABELIEF

    def squared(self, grad: Tensor, mean: Tensor) -> Tensor:
        return grad.sub_(mean)

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """m^ / (sqrt(s^) + eps)."""
        return corrected_ratio(states, count, self.config, eps=self.config.eps)


class Adam3(_ByMeans):
    """Adam with the square of the mean gradient in place of the gradient's: AdaM3 (ICDM 2023).

    The formula is that of AdaMomentum (Wang et al., 2106.11514).
    """

    declaration = update_rules.ADAM3

    def squared(self, grad: Tensor, mean: Tensor) -> Tensor:
        return mean

    def direction(
        self, master: Tensor, states: Sequence[Tensor], weight_decay: float, count: int
    ) -> Tensor:
        """m^ / sqrt(v^); 0 in the padding of the vocabulary, where a resumed run has v = 0."""
        least = torch.finfo(master.dtype).tiny  # changes no bit of another root
        return corrected_ratio(states, count, self.config, eps=least)
