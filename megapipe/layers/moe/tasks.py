"""Weight gradients of an MoE layer, deferred to ``W``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from megapipe.layers.moe.weights import ExpertGrads
from megapipe.layers.weight_grad import add_product
from megapipe.ops.moe.grouped import each_expert
from megapipe.ops.weight_grad import AccumulateKernel, torch_accumulate

_OfExperts = Tensor | Sequence[Tensor]
"""Values of all experts: one tensor [experts, ...], or one tensor [...] per expert."""


class ExpertsTask:
    """Weight and bias gradients of one linear layer of all experts that this rank computed, from
    rows of the layer's input `x` and output gradient `grad`, added to accumulators of `grads`.
    `weighted` [rows]: weights of the choices, which multiply the bias."""

    __slots__ = ("_accumulate", "_bias", "_ends", "_grads", "grad", "weight", "weighted", "x")

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        x: Tensor,
        grad: Tensor,
        ends: Sequence[int],
        accumulate: AccumulateKernel,
        grads: ExpertGrads,
        *,
        weighted: Tensor | None = None,
    ) -> None:
        self.weight, self._bias = weight, bias
        self.x, self.grad, self._ends = x, grad, ends
        self._accumulate, self._grads = accumulate, grads
        self.weighted = weighted

    def begin(self) -> None:
        """Start nothing: no operand is gathered."""

    def run(self) -> None:
        grads = self._grads
        weights = grads.of(self.weight)
        biases = None if self._bias is None else grads.of(self._bias)
        self._add(weights, biases)
        grads.finish(weights, self.weight)
        if self._bias is not None and biases is not None:
            grads.finish(biases, self._bias)

    def _add(self, weights: _OfExperts, biases: _OfExperts | None) -> None:
        for expert, rows in each_expert(self._ends):
            weight = weights[expert].flatten(0, -2)  # [out, in]
            self._accumulate(weight, self.grad[rows], self.x[rows])
        if biases is None:
            return
        for expert, rows in each_expert(self._ends):
            bias = biases[expert].flatten()
            if self.weighted is None:
                bias += self.grad[rows].sum(0, dtype=bias.dtype)
            else:
                bias.addmv_(self.grad[rows].to(bias.dtype).t(), self.weighted[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.grad, *(() if self.weighted is None else (self.weighted,)))


class RouterTask:
    """Weight gradient of a router, in the logits' type; `seen` maps x to the router's input."""

    __slots__ = ("_seen", "grad", "weight", "x")

    def __init__(
        self, weight: Parameter, x: Tensor, grad: Tensor, seen: Callable[[Tensor], Tensor]
    ) -> None:
        self.weight, self.x, self.grad = weight, x, grad
        self._seen = seen

    def begin(self) -> None:
        """Start nothing: no operand is gathered."""

    def run(self) -> None:
        add_product(self.weight, self.grad, self._seen(self.x), torch_accumulate)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.grad
