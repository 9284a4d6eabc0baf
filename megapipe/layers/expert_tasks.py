"""Weight gradients of a layer with experts, which wait for ``W``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import Parameter

from megapipe.layers.expert_fetch import Home
from megapipe.layers.weight_grad import add_product, main_grad
from megapipe.ops.grouped import each_expert
from megapipe.ops.weight_grad import AccumulateKernel, torch_accumulate


class ExpertsTask:
    """Weight and bias gradients of one linear layer of all experts that were computed here, from
    rows of its input and of its output's gradient; `weighted` [rows] multiplies the bias. They
    go `home`, where experts were fetched."""

    __slots__ = ("_accumulate", "_bias", "_ends", "_home", "grad", "weight", "weighted", "x")

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        x: Tensor,
        grad: Tensor,
        ends: Sequence[int],
        accumulate: AccumulateKernel,
        home: Home | None = None,
        *,
        weighted: Tensor | None = None,
    ) -> None:
        self.weight, self._bias = weight, bias
        self.x, self.grad, self._ends = x, grad, ends
        self._accumulate, self._home = accumulate, home
        self.weighted = weighted

    def begin(self) -> None:
        """Nothing is gathered."""

    def run(self) -> None:
        if self._home is None:
            self._add(main_grad(self.weight), None if self._bias is None else main_grad(self._bias))
            return
        weight = self._home.zeros(self.weight)
        bias = None if self._bias is None else self._home.zeros(self._bias)
        self._add(weight, bias)
        self._home.add(weight, self.weight)
        if self._bias is not None and bias is not None:
            self._home.add(bias, self._bias)

    def _add(self, weight: Tensor, bias: Tensor | None) -> None:
        """Into [experts, ...]."""
        weight = weight.flatten(1, -2)  # [experts, out, in]
        for expert, rows in each_expert(self._ends):
            self._accumulate(weight[expert], self.grad[rows], self.x[rows])
        if bias is None:
            return
        bias = bias.flatten(1)
        for expert, rows in each_expert(self._ends):
            if self.weighted is None:
                bias[expert] += self.grad[rows].sum(0, dtype=bias.dtype)
            else:
                bias[expert].addmv_(self.grad[rows].to(bias.dtype).t(), self.weighted[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.grad, *(() if self.weighted is None else (self.weighted,)))


class RouterTask:
    """Weight gradient of a router, in the type of its logits; `seen` is what it makes of x."""

    __slots__ = ("_seen", "grad", "weight", "x")

    def __init__(
        self, weight: Parameter, x: Tensor, grad: Tensor, seen: Callable[[Tensor], Tensor]
    ) -> None:
        self.weight, self.x, self.grad = weight, x, grad
        self._seen = seen

    def begin(self) -> None:
        """Nothing is gathered."""

    def run(self) -> None:
        add_product(self.weight, self.grad, self._seen(self.x), torch_accumulate)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.x, self.grad
