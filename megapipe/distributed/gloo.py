"""Sums and gathers over gloo, by messages from each member to each other one.

torch's reduce-scatter for gloo all-reduces a copy of the whole array, twice the bytes that anybody
needs, and its all-gather hands pieces on around a ring. Here a piece goes once, from where it is to
where it is used. Values are added in the order of the members at every place of the array, so a
reduce-scatter and an all-reduce give the same bits.

All members start collectives of one kind, and wait for all-reduces, in the same order.
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
"""Tags of messages: terms of a sum, pieces of a gather, sums of an all-reduce."""
LIMIT: list[datetime.timedelta] = []
"""Arguments of the wait for a message: how long it may take; none: as long as its group's."""


def await_messages_for(most: datetime.timedelta | None) -> None:
    """Have this process wait for messages up to `most`, or with None as long as their group does: a
    new time-out of a group does not hold for them."""
    LIMIT[:] = [] if most is None else [most]


def complete(work: Any) -> None:
    """Wait for a message of gloo's, for as long as its group does unless more has been said."""
    work.wait(*LIMIT)


def start_reduce_scatter(whole: Tensor, axis: Axis) -> tuple[Tensor, Callable[[], None]]:
    """Sum over the axis into this member's piece, which is there after the wait.

    [size * n, ...] -> [n, ...]; `whole` stays as it is. Takes the memory of size - 1 pieces.
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
    """Sum in place over the axis: [size * n]; half of the messages are sent in the wait."""
    total, summed = start_reduce_scatter(whole, axis)

    def wait() -> None:
        summed()
        _start_gather(whole, total, axis, SPREAD)()

    return wait


def start_all_gather(whole: Tensor, piece: Tensor, axis: Axis) -> Callable[[], None]:
    """Fill `whole` [size * n, ...] with every member's `piece` [n, ...].

    `piece` may be a view of this member's own rows of `whole`.
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
    """Messages on their way, and their `tensors`. gloo cannot cancel a message, so the destructor
    waits for those that nobody has waited for."""

    def __init__(self, works: list[Any], tensors: Sequence[Tensor]) -> None:
        self._works = works
        self._tensors = tensors

    def wait(self) -> None:
        works, self._works = self._works, []
        for work in works:
            complete(work)
        self._tensors = ()

    def __del__(self) -> None:
        with suppress(RuntimeError):  # a peer is gone, which others will notice
            self.wait()


def _start_exchange(
    sent: Sequence[Tensor], received: Sequence[Tensor], axis: Axis, tag: int
) -> Callable[[], None]:
    """Send `sent[i]` to member i and receive `received[i]` from it, for all others."""
    group: Any = axis.group
    others = [(axis.index + i) % axis.size for i in range(1, axis.size)]
    works = [group.recv([received[other]], other, tag) for other in others]
    works += [group.send([sent[other]], other, tag) for other in others]
    number = axis.line.count()
    exchange = _Exchange(works, [*sent, *received])
    return lambda: axis.line.wait(number, exchange.wait)
