"""How a segment of a model keeps what its backward needs.

A segment is a function from one tensor to one tensor. It can :func:`save_all` what autograd saves,
:func:`recompute` it in the backward from its input (Chen et al., 1604.06174; of modules of a layer:
Korthikanti et al., 2205.05198), or offload what it would keep to host memory
(:class:`~megapipe.layers.offload.ActivationOffload`).

Segments end in one of the project's linear layers, which queue their weight gradients
(:mod:`megapipe.layers.weight_grad`). A segment that is run again has ``graph_only`` set: the linear
layer at its end is given what it needs for the backward, but its product, whose value nobody
needs, is left out. So recomputing a norm costs a norm, and recomputing an activation function
costs just that, while the output of either exists from ``I`` to ``W`` only. The graph is walked
once, in ``I``, so a segment is run again once per micro-batch however the backward is split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""The core of torch.autograd.backward, without its fifty calls of preparation."""


Segment = Callable[..., Tensor]
"""(x, *rest, graph_only) -> y; with `graph_only` the output has no value."""


class SavePolicy(Protocol):
    """A way to run a segment that decides what is kept for its backward, such as
    :func:`save_all`."""

    def __call__(
        self, segment: Segment, x: Tensor, /, *rest: Any, graph_only: bool = ...
    ) -> Tensor: ...


def save_all(segment: Segment, x: Tensor, /, *rest: Any, graph_only: bool = False) -> Tensor:
    """Keep all that autograd saves."""
    return segment(x, *rest, graph_only=graph_only)


def recompute(segment: Segment, x: Tensor, /, *rest: Any, graph_only: bool = False) -> Tensor:
    """Keep x alone, and run the segment again in the backward.

    Random numbers are functions of coordinates (:mod:`megapipe.layers.rng`), so the
    second run has the values of the first one bitwise.
    """
    assert not graph_only, "a segment that is run again holds a segment that is, too"
    return _Recomputed.apply(x, segment, rest)


def recompute_except_attention(
    segment: Segment, x: Tensor, /, *rest: Any, graph_only: bool = False
) -> Tensor:
    """The same of a segment that attends, whose second argument is the micro-batch: results of
    attention are kept, too, and found again in the second run (the checkpoints of DistFlashAttn,
    2310.03294)."""
    assert not graph_only, "a segment that is run again holds a segment that is, too"
    mb, *others = rest
    return _Recomputed.apply(x, segment, (mb.storing_for_recompute(), *others))


class _Recomputed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, segment: Segment, rest: tuple[Any, ...]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.segment, ctx.rest = segment, rest
        return segment(x, *rest)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        rest, ctx.rest = ctx.rest, ()
        with torch.enable_grad():
            y = ctx.segment(x, *rest, graph_only=True)
        del rest
        edge = get_gradient_edge(y)
        del y
        run_backward((edge,), (grad,), False, False, (), True, True)
        return x.grad, None, None


class StageInput:
    """Receives the gradient of a stage's input without holding the input.

    A leaf, the usual input of a graph, is held by its gradient accumulator; here the graph alone
    holds the input, so it can be offloaded.
    """

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """`x` as the input of a graph; a backward leaves its gradient in `grad`."""
        return _Entrance.apply(x.new_empty(0).requires_grad_(), x, self)


class _Entrance(Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, entrance: StageInput) -> Tensor:
        ctx.entrance = entrance
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.entrance.grad = grad
        return None, None, None
