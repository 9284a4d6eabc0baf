"""Collectives over an :class:`~megapipe.axis.Axis`.

The functions hide two differences: torch 2.13 renamed the tensor collectives, and gloo
takes CUDA tensors for some operations only, so with gloo they travel through host memory (which
lets several ranks share one GPU). Each is its partner's gradient: all-gather and reduce-scatter,
all-reduce and identity; the layers pair them in their own backward, where the weight gradient
is split off. Those called `start_...` return before they are done: what they are given must stay as
it is, and what they return must not be read, until the returned wait has been called. On gloo
those of CPU tensors are messages between the members (:mod:`megapipe.tensor_parallel.direct`),
all-to-alls excepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.axis import Axis
from megapipe.tensor_parallel import direct

Wait = Callable[[], None]
"""Returns when the operation is complete, for the host (gloo) or the current stream (NCCL)."""

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def _on_gloo(axis: Axis) -> bool:
    return bool(dist.get_backend(axis.group) == "gloo")


def _staged(tensor: Tensor, axis: Axis) -> bool:
    return tensor.is_cuda and _on_gloo(axis)


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum in place over the axis; returns `tensor`."""
    if axis.group is None:
        return tensor
    if _staged(tensor, axis):
        host = tensor.cpu()
        dist.all_reduce(host, group=axis.group)
        return tensor.copy_(host)
    dist.all_reduce(tensor, group=axis.group)
    return tensor


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Concatenate the members' equal pieces along dim 0: [n, ...] -> [size * n, ...]."""
    if axis.group is None:
        return tensor
    staged = _staged(tensor, axis)
    piece = tensor.cpu() if staged else tensor.contiguous()
    whole = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    _all_gather(whole, piece, group=axis.group)
    return whole.to(tensor.device) if staged else whole


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis and keep this member's piece of dim 0: [size * n, ...] -> [n, ...]."""
    if axis.group is None:
        return tensor
    staged = _staged(tensor, axis)
    whole = tensor.cpu() if staged else tensor.contiguous()
    piece = whole.new_empty((whole.shape[0] // axis.size, *whole.shape[1:]))
    _reduce_scatter(piece, whole, group=axis.group)
    return piece.to(tensor.device) if staged else piece


def all_to_all(tensor: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
    """Give member i the i-th piece of a flat tensor: [sum(sends)] -> [sum(receives)].

    `sends` and `receives` are the lengths of the pieces by member; what is received is in the
    order of the members.
    """
    if axis.group is None:
        return tensor
    staged = _staged(tensor, axis)
    sent = tensor.cpu() if staged else tensor
    received = sent.new_empty(sum(receives))
    dist.all_to_all_single(received, sent, list(receives), list(sends), group=axis.group)
    return received.to(tensor.device) if staged else received


def start_all_reduce(tensor: Tensor, axis: Axis) -> Wait:
    """Sum in place over the axis."""
    if axis.group is None or _staged(tensor, axis):
        all_reduce(tensor, axis)
        return done
    if _on_gloo(axis):
        return direct.start_all_reduce(tensor, axis)
    return _wait_of(dist.all_reduce(tensor, group=axis.group, async_op=True))


def start_reduce_scatter(tensor: Tensor, axis: Axis) -> tuple[Tensor, Wait]:
    """Sum over the axis into this member's piece: [size * n] -> [n]."""
    if axis.group is None or _staged(tensor, axis):
        return reduce_scatter(tensor, axis), done
    if _on_gloo(axis):
        return direct.start_reduce_scatter(tensor, axis)
    piece = tensor.new_empty(tensor.shape[0] // axis.size)
    return piece, _wait_of(_reduce_scatter(piece, tensor, group=axis.group, async_op=True))


def start_all_gather(whole: Tensor, piece: Tensor, axis: Axis) -> Wait:
    """Fill the flat `whole` with every member's `piece`, which may be its own slice of it."""
    if axis.group is None:
        if piece.data_ptr() != whole.data_ptr():
            whole.copy_(piece)
        return done
    if _staged(whole, axis):
        whole.copy_(all_gather(piece, axis))
        return done
    if _on_gloo(axis):
        return direct.start_all_gather(whole, piece, axis)
    return _wait_of(_all_gather(whole, piece, group=axis.group, async_op=True))


def start_all_to_all(tensor: Tensor, axis: Axis) -> tuple[Tensor, Wait]:
    """Give the i-th piece to member i; returns the pieces received, by member: [size * n]."""
    if axis.group is None:
        return tensor, done
    staged = _staged(tensor, axis)
    sent = tensor.cpu() if staged else tensor
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=axis.group, async_op=not staged)
    return (received.to(tensor.device), done) if staged else (received, _wait_of(work))


def _wait_of(work: Any) -> Wait:
    def wait() -> None:
        work.wait()

    return wait


def done() -> None:
    """The wait of what is complete already."""
