"""Column- and row-parallel linear layers with a split backward.

A column-parallel layer holds rows of the weight [out/tp, in], a row-parallel one columns [out,
in/tp]; a pair of them needs one reduction in the forward and one in the backward. With sequence
parallelism (Korthikanti et al., 2205.05198) the activations around the pair hold s/tp positions,
and each all-reduce becomes an all-gather and a reduce-scatter.

The weight gradient is queued (:mod:`megapipe.layers.weight_grad`), unless the weight is frozen.
Gathered tensors are not saved: the queue holds this rank's positions, and ``W`` all-gathers all
positions again. ``B`` all-gathers an output gradient once, for input and weight gradient. ``B``
overlaps collectives with weight gradients: a column layer's weight gradient with the reduction of
its input gradient, a row layer's weight gradient with the next layer's all-gather.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import Parameter, functional

from megapipe.distributed.collectives import (
    Wait,
    all_gather,
    all_reduce,
    done,
    reduce_scatter,
    start_all_gather_new,
    start_all_reduce,
    start_reduce_scatter,
)
from megapipe.layers.parameter import Sharding, new_parameter
from megapipe.layers.specs import ParameterSpec
from megapipe.layers.weight_grad import add_product, main_grad


class LinearTask:
    """Weight and bias gradient of a linear layer, from x [s(/tp), b, in] and grad [s(/tp), b, out].

    x and grad are stored as matrices, [tokens, in] and [tokens, out].
    """

    __slots__ = ("_arrived", "grad", "layer", "whole", "x")

    def __init__(self, layer: ParallelLinear, x: Tensor, grad: Tensor) -> None:
        self.layer = layer
        self.x = x.detach().flatten(0, -2)
        self.grad = grad.flatten(0, -2)
        self.whole: Tensor | None = None
        """With sequence parallelism, all positions of x or grad, whichever of the two is split;
        None until their all-gather starts."""
        self._arrived: Wait = done

    @property
    def weight(self) -> Parameter:
        return self.layer.weight

    def begin(self) -> None:
        if self.layer.sharding.kernels.overlap:
            self._gather()

    def run(self) -> None:
        layer, left, right = self.layer, self.grad, self.x
        self._gather()
        if layer.bias is not None:
            bias = main_grad(layer.bias)
            bias.view(-1).add_(left.sum(0, dtype=bias.dtype))
        self._arrived()
        whole, self.whole = self.whole, None
        if whole is not None:
            left, right = (left, whole) if layer.splits_outputs else (whole, right)
        add_product(layer.weight, left, right, layer.sharding.kernels.accumulate)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x, self.grad) if self.whole is None else (self.x, self.grad, self.whole)

    def _gather(self) -> None:
        sharding = self.layer.sharding
        if sharding.sequence_split and self.whole is None:
            shard = self.x if self.layer.splits_outputs else self.grad
            self.whole, self._arrived = start_all_gather_new(shard, sharding.tp)


class ParallelLinear(nn.Module):
    """Base of parallel linear layers; a weight [k, out, in] holds k matrices applied as one."""

    weight: Parameter
    bias: Parameter | None
    splits_outputs: ClassVar[bool]
    """Whether tp splits the weight's rows (outputs); otherwise tp splits its columns (inputs)."""

    def __init__(
        self, sharding: Sharding, weight: ParameterSpec, bias: ParameterSpec | None = None
    ) -> None:
        super().__init__()
        dim = len(weight.shape) - (2 if self.splits_outputs else 1)
        whole = weight.split_dim is None and sharding.tp.size == 1
        assert whole or weight.split_dim == dim, f"{weight.name}: split over {weight.split_dim}"
        self.sharding = sharding
        self.frozen = weight.frozen
        self.weight = new_parameter(sharding, weight)
        self.bias = None if bias is None else new_parameter(sharding, bias)

    def product(self, x: Tensor) -> Tensor:
        """Return the output for `x`, without a graph."""
        raise NotImplementedError

    def input_grad(self, grad: Tensor) -> Tensor:
        """Return the gradient of the input, from the gradient of the output."""
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """Return the local weight as one matrix [k * out, in]."""
        weight = self.weight
        return weight if weight.dim() == 2 else weight.view(-1, weight.shape[-1])

    def vector(self) -> Tensor | None:
        """Return the local bias, if there is one, as one vector [k * out]."""
        bias = self.bias
        return bias if bias is None or bias.dim() == 1 else bias.view(-1)

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        split = self.sharding.tp.size if self.sharding.sequence_split else 1
        length = x.shape[0] * split if self.splits_outputs else x.shape[0] // split
        return length, *x.shape[1:-1], len(self.matrix())


def column_product(x: Tensor, weight: Tensor, bias: Tensor | None, sharding: Sharding) -> Tensor:
    """Multiply x [s(/tp), b, in] by rows [out/tp, in] of a matrix: [s, b, out/tp]."""
    whole = all_gather(x, sharding.tp) if sharding.sequence_split else x
    return functional.linear(whole, weight, bias)


def column_input_grad(grad: Tensor, weight: Tensor, sharding: Sharding) -> Tensor:
    """Return the input gradient of :func:`column_product` from its output gradient `grad`."""
    grad_x, summed = start_sum(grad @ weight, sharding)
    summed()
    return grad_x


def start_sum(partial: Tensor, sharding: Sharding) -> tuple[Tensor, Wait]:
    """Start to sum input gradients over tp: [s, b, in] -> [s(/tp), b, in]. Return the sum and a
    function that waits for it.

    Without ``kernels.tp_comm_overlap`` the sum is complete on return. `partial` may be overwritten.
    """
    if sharding.sequence_split:
        total, summed = start_reduce_scatter(partial, sharding.tp)
    else:
        total, summed = partial, start_all_reduce(partial, sharding.tp)
    if not sharding.kernels.overlap:
        summed()
        summed = done
    return total, summed


def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, sharding: Sharding) -> Tensor:
    """Multiply x [s, b, in/tp] by columns [out, in/tp], and sum over tp: [s(/tp), b, out]."""
    if sharding.tp.size == 1:
        return functional.linear(x, weight, bias)
    y = functional.linear(x, weight)  # [s, b, out], a partial sum over tp
    if sharding.sequence_split:
        y = reduce_scatter(y, sharding.tp)
    else:
        all_reduce(y, sharding.tp)
    return y if bias is None else y.add_(bias)


def row_input_grad(grad: Tensor, weight: Tensor, sharding: Sharding) -> Tensor:
    """Return the input gradient of :func:`row_product` from its output gradient `grad`."""
    whole = all_gather(grad, sharding.tp) if sharding.sequence_split else grad
    return whole @ weight


class _FrozenFunction(Function):
    """Autograd function of a frozen layer: the backward needs only the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ParallelLinear, skip_output: bool) -> Tensor:
        ctx.layer = layer
        if skip_output:
            return x.new_empty(()).expand(layer.output_shape(x))
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        layer: ParallelLinear = ctx.layer
        return layer.input_grad(grad), None, None


class _ColumnFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, layer: ColumnParallelLinear, skip_output: bool
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        if skip_output:
            return x.new_empty(()).expand(layer.output_shape(x))
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        layer: ColumnParallelLinear = ctx.layer
        queue = layer.sharding.queue
        task = LinearTask(layer, x, grad)
        if queue.at_once:
            task.begin()
        grad_x, summed = start_sum(torch.mm(task.grad, layer.matrix()), layer.sharding)
        queue.put(task)
        summed()
        return grad_x.view_as(x), None, None, None


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with the rows of W split over tp: [s(/tp), b, in] -> [s, b, k * out/tp].

    With `skip_output` the output has a graph but no values: no all-gather and no GEMM are done.
    """

    splits_outputs = True

    def forward(self, x: Tensor, skip_output: bool = False) -> Tensor:
        if self.frozen:
            return _FrozenFunction.apply(x, self, skip_output)
        return _ColumnFunction.apply(x, self.weight, self, skip_output)

    def product(self, x: Tensor) -> Tensor:
        return column_product(x, self.matrix(), self.vector(), self.sharding)

    def input_grad(self, grad: Tensor) -> Tensor:
        return column_input_grad(grad, self.matrix(), self.sharding)


def replicated_linear(sharding: Sharding, spec: ParameterSpec) -> ColumnParallelLinear:
    """Make a linear layer that every tp rank holds whole and applies to local positions."""
    layer = ColumnParallelLinear(sharding.unsplit(), spec)
    layer.weight = new_parameter(sharding, spec)  # its gradient may be local
    return layer


class _RowFunction(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Parameter, layer: RowParallelLinear, skip_output: bool
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        if skip_output:
            return x.new_empty(()).expand(layer.output_shape(x))
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        layer: RowParallelLinear = ctx.layer
        sharding, queue = layer.sharding, layer.sharding.queue
        task = LinearTask(layer, x, grad)
        if not sharding.sequence_split:
            grad_x = torch.mm(task.grad, layer.matrix())
            queue.put(task)
            return grad_x.view_as(x), None, None, None
        whole, gathered = start_all_gather_new(task.grad, sharding.tp)
        queue.run_postponed()
        gathered()
        if queue.at_once:
            task.whole = whole
        grad_x = torch.mm(whole, layer.matrix())
        queue.put(task, later=sharding.kernels.overlap)
        return grad_x.view_as(x), None, None, None


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the columns of W split over tp: [s, b, in/tp] -> [s(/tp), b, out].

    With `skip_output` the output has a graph but no values: no GEMM and no reduction are done.
    """

    splits_outputs = False

    def forward(self, x: Tensor, skip_output: bool = False) -> Tensor:
        if self.frozen:
            return _FrozenFunction.apply(x, self, skip_output)
        return _RowFunction.apply(x, self.weight, self, skip_output)

    def product(self, x: Tensor) -> Tensor:
        return row_product(x, self.matrix(), self.vector(), self.sharding)

    def input_grad(self, grad: Tensor) -> Tensor:
        return row_input_grad(grad, self.matrix(), self.sharding)
