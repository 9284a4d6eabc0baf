"""Experts of transformers classes: rows are sorted by expert, and each expert multiplies its own.

The class's router chooses. With expert parallelism a rank has some of a layer's experts: rows are
dispatched to the ranks of their experts and combined by the built-in model's dispatchers
(:mod:`megapipe.layers.moe.dispatch`), and autograd computes the gradients of the weights.

On torch's meta device, where nobody knows which expert a router chooses, all experts get equally
many rows. So plans need no values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from megapipe.layers.moe.dispatch import Combine, Dispatch, Dispatcher, Prefetch, joined
from megapipe.layers.moe.permutation import ExpertCounts
from megapipe.ops.moe.elementwise import TorchRows

NAME = "megapipe"
"""Name by which transformers finds :func:`experts`."""


_RUNNING: ContextVar[Dispatcher | None] = ContextVar("dispatcher of the layer", default=None)
SUM = TorchRows()
"""Kernel that sums the rows of a token."""


@contextmanager
def dispatching(dispatcher: Dispatcher | None) -> Iterator[None]:
    """Within the context, rows of experts go through `dispatcher`; None: experts are local."""
    token = _RUNNING.set(dispatcher)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def is_experts(module: nn.Module) -> bool:
    """Whether a module has experts that :func:`experts` computes: transformers sets the attributes
    that tell in which order their weights are."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed")


def experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of the chosen experts' outputs.

    `self`: a module with the experts' weights, as transformers names them. `hidden`: [t, h];
    `chosen`: expert numbers [t, k]; `weights`: [t, k].
    """
    dispatcher = _RUNNING.get()
    if dispatcher is not None:
        return _dispatched(self, hidden, chosen, weights, dispatcher)
    if hidden.is_cuda and hidden.dtype == torch.bfloat16:
        y: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden, chosen, weights)
        return y
    number, top_k = self.num_experts, chosen.shape[-1]
    of_row = chosen.flatten()
    order = of_row.argsort(stable=True)
    tokens = order // top_k
    counts = even_counts(len(of_row), number) if hidden.is_meta else row_counts(of_row, number)
    rows = _mlp(self, hidden[tokens], counts)
    rows = _weighted(rows, weights.flatten()[order])
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    high = torch.promote_types(rows.dtype, torch.float32)
    return rows[back].view(-1, top_k, rows.shape[-1]).sum(1, dtype=high).to(hidden.dtype)


def _mlp(self: Any, rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Compute the experts of rows [r, h] in the order of experts -> [r, h]."""
    up = (self.gate_up_proj, "gate_up_proj") if self.has_gate else (self.up_proj, "up_proj")
    rows = _by_expert(self, rows, *up, counts)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _by_expert(self, rows, self.down_proj, "down_proj", counts)
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    return rows


def _weighted(rows: Tensor, weights: Tensor) -> Tensor:
    """Multiply rows [r, h] by the weights of their choices [r], in the type of the rows."""
    return (rows * weights.unsqueeze(-1)).to(rows.dtype)


def _by_expert(self: Any, rows: Tensor, weight: Tensor, name: str, counts: Sequence[int]) -> Tensor:
    """Multiply the rows of each expert by its matrix: [r, in] -> [r, out]."""
    biases = getattr(self, f"{name}_bias").unbind() if self.has_bias else [None] * len(counts)
    matrices = weight.mT.unbind() if self.is_transposed else weight.unbind()
    parts = zip(rows.split([*counts]), matrices, biases, strict=True)
    return torch.cat([functional.linear(*part) for part in parts])


def _dispatched(
    self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor, dispatcher: Dispatcher
) -> Tensor:
    """Do as :func:`experts`, with experts on all ranks of the dispatcher's group. Collective."""
    slots = chosen.to(torch.int16)
    count = even_rows if hidden.is_meta else rows_of_ranks
    dispatch = dispatcher.dispatch(slots, count(slots, self.num_experts, dispatcher))
    rows = _Dispatched.apply(hidden, dispatch)
    of_rows = _DispatchedWeights.apply(weights, dispatch)
    counts = [stop - start for start, stop in pairwise([0, *dispatch.plan.ends])]
    y = _weighted(_mlp(self, rows, counts), of_rows)
    summed: Tensor = _Combined.apply(y, dispatch)
    return summed


def rows_of_ranks(choice: Tensor, number: int, dispatcher: Dispatcher) -> ExpertCounts:
    return dispatcher.count(choice, number, dispatcher.counting)


def even_rows(choice: Tensor, number: int, dispatcher: Dispatcher) -> ExpertCounts:
    """Return counts of equally many rows for each expert, known without values."""
    known = [even_counts(choice.numel(), number)] * dispatcher.counting.size
    return ExpertCounts(known, rows_of_ranks(choice, number, dispatcher).on_device)


class _Nothing:
    """Transfer of weights that are all local."""

    def start(self, number: int) -> None: ...

    def start_next_hop(self, number: int) -> None: ...

    def wait(self, number: int) -> None: ...


def _received(dispatch: Dispatch, values: Prefetch[Tensor]) -> Tensor:
    """Return the values of all chunks, in the order of experts."""
    chunks = dispatch.pipelined_chunks(_Nothing(), values)
    return joined([part for _, _, (part,) in chunks])


def _returned(dispatch: Dispatch, combine: Combine, rows: Tensor) -> Tensor:
    """Send values of rows back; return those of the local tokens' rows."""
    for chunk in dispatch.plan.chunks:
        combine.send(rows[chunk.expert_rows])
    return combine.wait()


def _summed(dispatch: Dispatch, rows: Tensor) -> Tensor:
    """Send rows [r, h] back and sum those of each token: [t, h]."""
    own = _returned(dispatch, dispatch.combine(), rows)
    high = torch.promote_types(rows.dtype, torch.float32)
    return dispatch.rows.unpermute(own, high, SUM).to(rows.dtype)


class _Dispatched(Function):
    """Tokens [t, h] -> rows of the local experts [r, h]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return _received(dispatch, dispatch.dispatch_tokens(hidden))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _summed(ctx.dispatch, grad), None


class _DispatchedWeights(Function):
    """Weights of choices [t, k] -> those of the local experts' rows [r]."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return _received(dispatch, dispatch.dispatch_weights(weights))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dispatch = ctx.dispatch
        own = _returned(dispatch, dispatch.combine_weight_grads(), grad)
        return dispatch.rows.unpermute_weights(own), None


class _Combined(Function):
    """Outputs of the local experts' rows [r, h] -> sums over the choices of each token [t, h]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return _summed(dispatch, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _received(ctx.dispatch, ctx.dispatch.dispatch_tokens(grad.contiguous())), None


def row_counts(of_row: Tensor, number: int) -> list[int]:
    counts: list[int] = torch.bincount(of_row, minlength=number).tolist()
    return counts


def even_counts(rows: int, number: int) -> list[int]:
    """Return the number of rows of each expert if all have equally many, up to one."""
    return [rows // number + (expert < rows % number) for expert in range(number)]


def register() -> None:
    """Make :func:`experts` known to transformers."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
