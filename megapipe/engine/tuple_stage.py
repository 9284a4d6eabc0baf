"""A stage whose messages may be tuples of tensors.

Integer and boolean tensors have no gradient, so the gradient of a message is the tuple of the
gradients of its floating-point tensors, in order; a single gradient is a tensor, not a tuple.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megapipe.engine.stage import Key, Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.recompute import run_backward
from megapipe.model.interface import Message


class _Ends(NamedTuple):
    inputs: tuple[Tensor, ...]
    """Floating-point inputs; the backward writes their gradients into ``.grad``."""
    edges: tuple[GradientEdge | None, ...]
    """Edges of the floating-point outputs; None if one depends on no parameter and no input."""


class TupleStage(Stage):
    """A stage whose input and output are tensors or tuples of tensors, without sequence slices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ends: dict[Key, _Ends] = {}

    def begin(self, *, train: bool) -> None:
        super().begin(train=train)
        self._ends.clear()

    def input_grad(self, key: Key, grad: Message) -> Message:
        if key in self._inputs:
            self.recompute(key)
        inputs, edges = self._ends.pop(key)
        self.queue.open(key)
        grads = _as_tuple(self._unit if grad is None else grad)
        both = [(e, g) for e, g in zip(edges, grads, strict=True) if e is not None]
        run_backward(
            tuple(edge for edge, _ in both),
            tuple(each for _, each in both),
            False,
            False,
            (),
            True,
            True,
        )
        if not inputs:
            return None
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        return found[0] if len(found) == 1 else tuple(found)

    def _build(self, key: Key, x: Message, mb: MicroBatch, *, skip_output: bool = False) -> Message:
        detached = x
        if x is not None:
            leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in _as_tuple(x)]
            detached = tuple(leaves) if isinstance(x, tuple) else leaves[0]
        y = self.module(detached, mb, None, skip_output=skip_output)
        root = y * mb.scale if self.is_last else y
        inputs = () if x is None else tuple(t for t in leaves if t.is_floating_point())
        outputs = (t for t in _as_tuple(root) if t.is_floating_point())
        edges = tuple(get_gradient_edge(t) if t.requires_grad else self._no_edge() for t in outputs)
        self._ends[key] = _Ends(inputs, edges)
        return tuple(t.detach() for t in y) if isinstance(y, tuple) else y.detach()


def _as_tuple(message: Message) -> tuple[Tensor, ...]:
    return message if isinstance(message, tuple) else (message,)
