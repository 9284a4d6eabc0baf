"""Collectives over an :class:`~megapipe.distributed.axis.Axis`.

The functions hide two differences. torch 2.13 renamed the tensor collectives. And gloo supports
CUDA tensors in some operations only, so with gloo CUDA tensors are copied through host memory,
which lets several ranks share one GPU. Collectives come in pairs that are each other's backward:
all-gather and reduce-scatter, all-reduce and identity. Layers apply these pairs in their own
backward, because the weight gradient is computed separately there.

A function ``start_...`` starts a collective and returns a wait function. Until the wait returns,
the arguments must not change and the results must not be read. :func:`all_reduce`,
:func:`all_gather`, :func:`reduce_scatter` and :func:`all_to_all` use the same routines and wait at
once, so values do not depend on the time of the wait. On gloo, all-gathers and reduce-scatters of
CPU tensors are messages between the members (:mod:`megapipe.distributed.gloo`), and so are
all-reduces with `in_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed import gloo
from megapipe.distributed.axis import Axis

Wait = Callable[[], None]
"""Function that waits until an operation is complete: on the host (gloo) or the stream (NCCL)."""

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum `tensor` in place over the axis, and return it."""
    start_all_reduce(tensor, axis)()
    return tensor


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Concatenate the members' equal parts along dim 0: [n, ...] -> [size * n, ...]."""
    whole, wait = start_all_gather_new(tensor, axis)
    wait()
    return whole


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis and return this member's part of dim 0: [size * n, ...] -> [n, ...]."""
    piece, wait = start_reduce_scatter(tensor, axis)
    wait()
    return piece


def all_to_all(tensor: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
    """Send the i-th part of a flat tensor to member i: [sum(sends)] -> [sum(receives)].

    `sends` and `receives` are the lengths of the parts, by member. The result has the received
    parts in the order of the members.
    """
    received, wait = start_all_to_all(tensor, axis, sends, receives)
    wait()
    return received


def start_all_reduce(tensor: Tensor, axis: Axis, *, in_order: bool = False) -> Wait:
    """Start a sum in place over the axis.

    With `in_order`, gloo adds the terms in the order of the members, so the sum is bitwise equal to
    the sum of :func:`start_reduce_scatter`. Half of the messages are then sent during the wait, and
    `tensor` must be flat, [size * n].
    """
    if axis.group is None:
        return done
    if _staged(tensor, axis):
        host = tensor.cpu()
        _started(dist.all_reduce, axis, host)()
        tensor.copy_(host)
        return done
    if in_order and _by_messages(axis):
        return gloo.start_all_reduce(tensor, axis)
    return _started(dist.all_reduce, axis, tensor)


def start_reduce_scatter(whole: Tensor, axis: Axis) -> tuple[Tensor, Wait]:
    """Start a sum over the axis into this member's part of dim 0: [size * n, ...] -> [n, ...]."""
    if axis.group is None:
        return whole, done
    if _staged(whole, axis):
        return reduce_scatter(whole.cpu(), axis).to(whole.device), done
    whole = whole.contiguous()
    if _by_messages(axis):
        return gloo.start_reduce_scatter(whole, axis)
    piece = whole.new_empty((whole.shape[0] // axis.size, *whole.shape[1:]))
    return piece, _started(_reduce_scatter, axis, piece, whole)


def start_all_gather_new(piece: Tensor, axis: Axis) -> tuple[Tensor, Wait]:
    """Start an :func:`all_gather` into a new tensor: [n, ...] -> [size * n, ...]."""
    if axis.group is None:
        return piece, done
    whole = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    return whole, start_all_gather(whole, piece.contiguous(), axis)


def start_all_gather(whole: Tensor, piece: Tensor, axis: Axis) -> Wait:
    """Start filling `whole` [size * n, ...] with every member's `piece` [n, ...].

    `piece` may be a view of this member's part of `whole`.
    """
    if axis.group is None:
        if piece.data_ptr() != whole.data_ptr():
            whole.copy_(piece)
        return done
    if _staged(whole, axis):
        whole.copy_(all_gather(piece.cpu(), axis))
        return done
    if _by_messages(axis):
        return gloo.start_all_gather(whole, piece, axis)
    return _started(_all_gather, axis, whole, piece)


def start_all_to_all(
    tensor: Tensor,
    axis: Axis,
    sends: Sequence[int] | None = None,
    receives: Sequence[int] | None = None,
) -> tuple[Tensor, Wait]:
    """Start an :func:`all_to_all` of a flat tensor. Without `sends` and `receives` all parts have
    equal length: [size * n]."""
    if axis.group is None:
        return tensor, done
    sent = tensor.cpu() if _staged(tensor, axis) else tensor
    lengths: list[Any] = []
    if sends is not None and receives is not None:
        lengths = [list(receives), list(sends)]
    received = sent.new_empty(sum(lengths[0])) if lengths else torch.empty_like(sent)
    wait = _started(dist.all_to_all_single, axis, received, sent, *lengths)
    if sent is tensor:
        return received, wait
    wait()
    return received.to(tensor.device), done


def start_send(tensor: Tensor, pair: Axis) -> Wait:
    """Start sending a contiguous tensor to the other member of a group of two."""
    given = tensor.cpu() if _staged(tensor, pair) else tensor
    group: Any = pair.group
    return _message(pair, group.send([given], 1 - pair.index, 0), given)


def start_receive(tensor: Tensor, pair: Axis) -> Wait:
    """Start receiving into a contiguous tensor from the other member of a group of two."""
    group: Any = pair.group
    if not _staged(tensor, pair):
        return _message(pair, group.recv([tensor], 1 - pair.index, 0), tensor)
    host = torch.empty_like(tensor, device="cpu")
    arrived = _message(pair, group.recv([host], 1 - pair.index, 0), host)

    def wait() -> None:
        arrived()
        tensor.copy_(host)

    return wait


def _message(pair: Axis, work: Any, tensor: Tensor) -> Wait:
    """Return the wait for a started message. The wait keeps `tensor` alive until it returns."""
    number, kept = pair.line.count(), [tensor]
    complete = partial(gloo.complete, work) if _on_gloo(pair) else work.wait

    def wait() -> None:
        pair.line.wait(number, complete)
        kept.clear()

    return wait


def done() -> None:
    """Return at once: the wait for a collective that is already complete."""


def _started(collective: Callable[..., Any], axis: Axis, *arguments: Any) -> Wait:
    """Start a torch collective. The returned wait keeps the tensors alive, because NCCL uses them
    on a stream that the allocator does not know."""
    if torch.compiler.is_compiling():
        # inside a compiled graph a collective has no handle, and the compiler places the wait
        collective(*arguments, group=axis.group)
        return done
    number = axis.line.count()
    work = collective(*arguments, group=axis.group, async_op=True)

    def wait() -> None:
        nonlocal arguments
        axis.line.wait(number, work.wait)
        arguments = ()

    return wait


def _on_gloo(axis: Axis) -> bool:
    return axis.backend == "gloo"


def _by_messages(axis: Axis) -> bool:
    return not torch.compiler.is_compiling() and _on_gloo(axis)


def _staged(tensor: Tensor, axis: Axis) -> bool:
    return tensor.is_cuda and _on_gloo(axis)
