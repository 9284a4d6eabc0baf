"""Collectives over an :class:`~megapipe.mesh.Axis`.

The functions hide two differences: torch 2.13 renamed the tensor collectives, and gloo
takes CUDA tensors for some operations only, so with gloo they travel through host memory (which
lets several ranks share one GPU). Each is its partner's gradient: all-gather and reduce-scatter,
all-reduce and identity; the layers pair them in their own backward, where the weight gradient
is split off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapipe.mesh import Axis

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def _staged(tensor: Tensor, axis: Axis) -> bool:
    return tensor.is_cuda and dist.get_backend(axis.group) == "gloo"


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum in place over the axis; returns `tensor`."""
    return _reduce(tensor, axis, dist.ReduceOp.SUM)


def all_reduce_max(tensor: Tensor, axis: Axis) -> Tensor:
    """Take the largest in place over the axis; returns `tensor`."""
    return _reduce(tensor, axis, dist.ReduceOp.MAX)


def _reduce(tensor: Tensor, axis: Axis, op: Any) -> Tensor:
    if axis.group is None:
        return tensor
    if _staged(tensor, axis):
        host = tensor.cpu()
        dist.all_reduce(host, op=op, group=axis.group)
        return tensor.copy_(host)
    dist.all_reduce(tensor, op=op, group=axis.group)
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


def all_gather_in_place(buffer: Tensor, axis: Axis) -> None:
    """Fill the flat `buffer` with every member's own slice of it."""
    if axis.group is None:
        return
    piece = buffer.chunk(axis.size)[axis.index]
    if _staged(buffer, axis):
        buffer.copy_(all_gather(piece, axis))
    else:
        _all_gather(buffer, piece, group=axis.group)


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis and keep this member's piece of dim 0: [size * n, ...] -> [n, ...]."""
    if axis.group is None:
        return tensor
    staged = _staged(tensor, axis)
    whole = tensor.cpu() if staged else tensor.contiguous()
    piece = whole.new_empty((whole.shape[0] // axis.size, *whole.shape[1:]))
    _reduce_scatter(piece, whole, group=axis.group)
    return piece.to(tensor.device) if staged else piece
