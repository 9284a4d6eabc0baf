"""How a segment of a model saves what its backward needs.

A segment is a function from one tensor to one tensor. One of three policies decides what it saves.
With :func:`save_all`, autograd saves what it needs. With :func:`recompute`, the backward computes
the segment again from its input (Chen et al., 1604.06174; modules of a layer: Korthikanti et al.,
2205.05198). With :class:`~megapipe.layers.offload.ActivationOffload`, saved tensors are offloaded
to host memory.

Segments end in one of megapipe's linear layers, which queue their weight gradients
(:mod:`megapipe.layers.weight_grad`). Recomputation sets ``skip_output``: the last linear layer gets
the input that its backward needs, but skips its product, whose value is not needed. So recomputing
a norm costs only a norm, and recomputing an activation function costs only the function. The
outputs of both exist only from ``I`` to ``W``. The graph is walked once, in ``I``, so a segment is
recomputed once per micro-batch however the backward is split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

run_backward: Any = torch.autograd.Variable._execution_engine.run_backward
"""Core of torch.autograd.backward, without the fifty Python calls that prepare it."""


Segment = Callable[..., Tensor]
"""Function (x, *rest, skip_output) -> y; with `skip_output` y has a graph but no values."""


class SavePolicy(Protocol):
    """Runs a segment and decides what is saved for its backward, e.g. :func:`save_all`."""

    def __call__(
        self, segment: Segment, x: Tensor, /, *rest: Any, skip_output: bool = ...
    ) -> Tensor: ...


def save_all(segment: Segment, x: Tensor, /, *rest: Any, skip_output: bool = False) -> Tensor:
    """Run the segment, and save all that autograd saves."""
    return segment(x, *rest, skip_output=skip_output)


def recompute(segment: Segment, x: Tensor, /, *rest: Any, skip_output: bool = False) -> Tensor:
    """Save only x, and recompute the segment in the backward.

    Random numbers are functions of coordinates (:mod:`megapipe.layers.rng`), so the recomputation
    is bitwise equal to the first run.
    """
    assert not skip_output, "a recomputed segment contains another recomputed segment"
    return _Recomputed.apply(x, segment, rest)


def recompute_except_attention(
    segment: Segment, x: Tensor, /, *rest: Any, skip_output: bool = False
) -> Tensor:
    """Recompute an attention segment in the backward, but not attention itself: its output and LSE
    are saved (DistFlashAttn, 2310.03294). The segment's second argument is the micro-batch."""
    assert not skip_output, "a recomputed segment contains another recomputed segment"
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
            y = ctx.segment(x, *rest, skip_output=True)
        del rest
        edge = get_gradient_edge(y)
        del y
        run_backward((edge,), (grad,), False, False, (), True, True)
        return x.grad, None, None


class StageInput:
    """Receives the gradient of a stage's input without holding the input.

    A leaf, the usual input of a graph, is held by its gradient accumulator. With this class only
    the graph holds the input, so it can be offloaded.
    """

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def of(self, x: Tensor) -> Tensor:
        """Return `x` as the input of a graph; a backward writes its gradient to `grad`."""
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
