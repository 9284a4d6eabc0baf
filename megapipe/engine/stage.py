"""A model chunk and its four operations: forward, backward, input gradient, weight gradient.

The stage keeps, per micro-batch in flight, the input (whose ``.grad`` the backward fills) and the
*edge* of the output in the autograd graph, not the output itself: once sent, the output's memory
is free while its graph waits for the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megapipe.engine.weight_grad import WeightGradQueue, accumulate_in_main_grad
from megapipe.model.gpt import GPTStage
from megapipe.model.microbatch import MicroBatch
from megapipe.tensor_parallel.parameter import spec_of


class _InFlight(NamedTuple):
    input: Tensor | None
    edge: GradientEdge


class Stage:
    """Runs the ops of one virtual stage; `loss_sums` collects the last stage's losses."""

    def __init__(self, module: GPTStage) -> None:
        self.module = module
        self.queue: WeightGradQueue = module.sharding.queue
        self._in_flight: dict[int, _InFlight] = {}
        self.loss_sums: dict[int, Tensor] = {}
        """Sum of the masked token losses (nats) per micro-batch, on the last stage."""

    @property
    def is_first(self) -> bool:
        return self.module.spec.embedding

    @property
    def is_last(self) -> bool:
        return self.module.spec.head

    def own_autograd_parameters(self) -> None:
        """Route gradients that autograd itself computes into the main gradients.

        To be called once the parameters have their storage.
        """
        for parameter in self.module.parameters():
            if spec_of(parameter).by_autograd:
                accumulate_in_main_grad(parameter)

    def forward(self, microbatch: int, x: Tensor | None, mb: MicroBatch) -> Tensor | None:
        """Run ``F``. Returns the output to pass on, None on the last stage."""
        self.module.train()
        if x is not None:
            x = x.detach().requires_grad_()
        y = self.module(x, mb)
        if self.is_last:
            y = self._masked_sum(microbatch, y, mb) * mb.scale
        self._in_flight[microbatch] = _InFlight(x, get_gradient_edge(y))
        return None if self.is_last else y.detach()

    @torch.no_grad()
    def evaluate(self, microbatch: int, x: Tensor | None, mb: MicroBatch) -> Tensor | None:
        """Forward without a graph, for validation."""
        self.module.eval()
        y = self.module(x, mb)
        if self.is_last:
            self._masked_sum(microbatch, y, mb)
            return None
        return y

    def _masked_sum(self, microbatch: int, losses: Tensor, mb: MicroBatch) -> Tensor:
        assert mb.mask is not None
        total = (losses * mb.mask.t()).sum()
        self.loss_sums[microbatch] = total.detach()
        return total

    def input_grad(self, microbatch: int, grad: Tensor | None) -> Tensor | None:
        """Run ``I``: back-propagate, queue the weight gradients, return the input's gradient."""
        x, edge = self._in_flight.pop(microbatch)
        self.queue.open(microbatch)
        torch.autograd.backward([edge], [grad])
        if x is None:
            return None
        grad, x.grad = x.grad, None
        return grad

    @torch.no_grad()
    def weight_grad(self, microbatch: int) -> None:
        """Run ``W``: the queued weight gradients of one micro-batch."""
        self.queue.run(microbatch)

    def reset(self) -> None:
        """Forget everything in flight."""
        self._in_flight.clear()
        self.loss_sums.clear()
        self.queue.clear()
