"""Collectives over an :class:`~megapipe.distributed.axis.Axis`.

The functions hide two differences: torch 2.13 renamed the tensor collectives, and gloo
takes CUDA tensors for some operations only, so with gloo they travel through host memory (which
lets several ranks share one GPU). Collectives come in pairs of which each is the other's gradient:
all-gather and reduce-scatter, all-reduce and identity; the layers pair them in their own backward,
where the weight gradient is split off.

A collective ``start_...`` returns a wait before it is complete: until that wait has been called,
its arguments must stay as they are and its results must not be read. :func:`all_reduce`,
:func:`all_gather`, :func:`reduce_scatter` and :func:`all_to_all` call the same routine and wait at
once, so values do not depend on when one waits. On gloo, gathers and reduce-scatters of CPU tensors
are messages between the members (:mod:`megapipe.distributed.gloo`), and so are all-reduces with
`in_order`.
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
"""Returns when the operation is complete, for the host (gloo) or the current stream (NCCL)."""

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)


def all_reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum in place over the axis; returns `tensor`."""
    start_all_reduce(tensor, axis)()
    return tensor


def all_gather(tensor: Tensor, axis: Axis) -> Tensor:
    """Concatenate the members' equal pieces along dim 0: [n, ...] -> [size * n, ...]."""
    whole, wait = start_all_gather_new(tensor, axis)
    wait()
    return whole


def reduce_scatter(tensor: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis and keep this member's piece of dim 0: [size * n, ...] -> [n, ...]."""
    piece, wait = start_reduce_scatter(tensor, axis)
    wait()
    return piece


def all_to_all(tensor: Tensor, sends: Sequence[int], receives: Sequence[int], axis: Axis) -> Tensor:
    """Give member i the i-th piece of a flat tensor: [sum(sends)] -> [sum(receives)].

    `sends` and `receives` are the lengths of the pieces by member; what is received is in the
    order of the members.
    """
    received, wait = start_all_to_all(tensor, axis, sends, receives)
    wait()
    return received


def start_all_reduce(tensor: Tensor, axis: Axis, *, in_order: bool = False) -> Wait:
    """Sum in place over the axis.

    With `in_order` gloo adds the terms in the order of the members, so that a sum has the bits that
    :func:`start_reduce_scatter` gives its pieces; half of the messages are then sent in the wait.
    `tensor` is flat in that case, [size * n].
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
    """Sum over the axis into this member's piece of dim 0: [size * n, ...] -> [n, ...]."""
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
    """Begin an :func:`all_gather`: [n, ...] -> [size * n, ...]."""
    if axis.group is None:
        return piece, done
    whole = piece.new_empty((axis.size * piece.shape[0], *piece.shape[1:]))
    return whole, start_all_gather(whole, piece.contiguous(), axis)


def start_all_gather(whole: Tensor, piece: Tensor, axis: Axis) -> Wait:
    """Fill `whole` [size * n, ...] with every member's `piece` [n, ...].

    `piece` may be a view of this member's own rows of `whole`.
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
    """Begin an :func:`all_to_all` of a flat tensor, without lengths of equal pieces: [size * n]."""
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
    """Send a contiguous tensor to the other member of a group of two, which receives it."""
    given = tensor.cpu() if _staged(tensor, pair) else tensor
    group: Any = pair.group
    return _message(pair, group.send([given], 1 - pair.index, 0), given)


def start_receive(tensor: Tensor, pair: Axis) -> Wait:
    """Receive what the other member of a group of two sends into a contiguous tensor."""
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
    """Wait for a message that has begun; its tensor lives until then."""
    number, kept = pair.line.count(), [tensor]
    complete = partial(gloo.complete, work) if _on_gloo(pair) else work.wait

    def wait() -> None:
        pair.line.wait(number, complete)
        kept.clear()

    return wait


def done() -> None:
    """A wait for a collective that is complete already."""


def _started(collective: Callable[..., Any], axis: Axis, *arguments: Any) -> Wait:
    """Begin one of torch's collectives. Its tensors live until the wait: NCCL reads and writes them
    on a stream of its own, of which the allocator knows nothing."""
    if torch.compiler.is_compiling():
        # a graph has collectives without a handle, and its compiler says when to wait
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
