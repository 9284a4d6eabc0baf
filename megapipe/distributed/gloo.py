"""Sums and gathers over gloo, as direct messages between all members.

torch's reduce-scatter for gloo all-reduces a copy of the whole tensor, which sends twice the bytes
needed. torch's all-gather passes parts around a ring. In this module each part is sent once,
directly to the member that uses it. Every element is summed in the order of the members, so a
reduce-scatter and an all-reduce give bitwise equal sums.

All members must start collectives of one kind in the same order, and must wait for all-reduces in
the same order.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis

SUM, GATHER, SPREAD = 1, 2, 3
"""Message tags: for terms of a sum, for parts of a gather, and for the sums of an all-reduce."""
LIMIT: list[datetime.timedelta] = []
"""Arguments for each wait for a message: a time limit; or nothing, for the group's timeout."""


def await_messages_for(most: datetime.timedelta | None) -> None:
    """Set the time limit of this process's waits for messages; None: the timeout with which each
    group was made. Later changes of a group's default timeout do not affect these waits."""
    LIMIT[:] = [] if most is None else [most]


def complete(work: Any) -> None:
    """Wait for a gloo message, up to the time limit in :data:`LIMIT` or the group's timeout."""
    work.wait(*LIMIT)


def start_reduce_scatter(whole: Tensor, axis: Axis) -> tuple[Tensor, Callable[[], None]]:
    """Start a sum over the axis into this member's part, which is ready after the wait.

    [size * n, ...] -> [n, ...]; `whole` is not changed. Receiving takes memory for size - 1 parts.
    """
    pieces = _pieces(whole, axis)
    terms = [
        piece if member == axis.index else torch.empty_like(piece)
        for member, piece in enumerate(pieces)
    ]
    exchanged = _start_exchange(pieces, terms, axis, SUM)
    total = terms[1 if axis.index == 0 else 0]

    def wait() -> None:
        exchanged()
        first, second, *others = terms
        torch.add(first, second, out=total)
        for other in others:
            total.add_(other)
        terms.clear()

    return total, wait


def start_all_reduce(whole: Tensor, axis: Axis) -> Callable[[], None]:
    """Start a sum in place over the axis, [size * n]. The wait sends half of the messages."""
    total, summed = start_reduce_scatter(whole, axis)

    def wait() -> None:
        summed()
        _start_gather(whole, total, axis, SPREAD)()

    return wait


def start_all_gather(whole: Tensor, piece: Tensor, axis: Axis) -> Callable[[], None]:
    """Start filling `whole` [size * n, ...] with every member's `piece` [n, ...].

    `piece` may be a view of this member's part of `whole`.
    """
    return _start_gather(whole, piece, axis, GATHER)


def _start_gather(whole: Tensor, piece: Tensor, axis: Axis, tag: int) -> Callable[[], None]:
    pieces = _pieces(whole, axis)
    own = pieces[axis.index]
    if own.data_ptr() != piece.data_ptr():
        own.copy_(piece)
    return _start_exchange([piece] * axis.size, pieces, axis, tag)


def _pieces(whole: Tensor, axis: Axis) -> tuple[Tensor, ...]:
    assert len(whole) % axis.size == 0, f"{len(whole)} rows for {axis.size} members"
    return whole.chunk(axis.size)


class _Exchange:
    """Messages in flight, with the `tensors` that they use. gloo cannot cancel a message, so the
    destructor waits for the messages if nobody has waited."""

    def __init__(self, works: list[Any], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            complete(work)
        self._tensors = ()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # the peer is lost, which other code reports
            self.wait()


def _start_exchange(
    sent: Sequence[Tensor], received: Sequence[Tensor], axis: Axis, tag: int
) -> Callable[[], None]:
    """Start sending `sent[i]` to and receiving `received[i]` from every other member i."""
    group: Any = axis.group
    others = [(axis.index + i) % axis.size for i in range(1, axis.size)]
    works = [group.recv([received[other]], other, tag) for other in others]
    works += [group.send([sent[other]], other, tag) for other in others]
    number = axis.line.count()
    exchange = _Exchange(works, [*sent, *received])
    return lambda: axis.line.wait(number, exchange.wait)
