"""Point-to-point messages between members of a group, all started together."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.gloo import complete

TAG = 4
"""Tag of the messages on gloo. :mod:`megapipe.distributed.gloo` uses other tags."""


class PeerMessage(NamedTuple):
    """A tensor to send to a member of the group, or memory to receive a tensor from it."""

    tensor: Tensor
    member: int


class PendingExchange(NamedTuple):
    """Sends and receives in flight."""

    received: Callable[[], None]
    """Function that waits until all messages are received."""
    sent: Callable[[], None]
    """Function that waits until the sent tensors may be changed."""


def start_exchange(
    sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], axis: Axis
) -> PendingExchange:
    """Start sends and receives. All members must call the function equally often.

    Between two members, messages are received in the order in which they are sent. On NCCL all
    messages are one group of operations, as safe as a collective. If the host of one member is
    delayed, for example because it loads a kernel, the other members can still start theirs: they
    depend only on operations that the delayed host has started before.
    """
    number = axis.line.count()
    if axis.backend == "nccl":
        works, staged = _start_nccl(sends, receives, axis), []
        of_sends = of_receives = works
        wait: Callable[[Any], object] = operator.methodcaller("wait")
    else:
        host = [_on_host(letter) for letter in receives]
        staged = [
            (letter.tensor, own.tensor)
            for letter, own in zip(receives, host, strict=True)
            if own is not letter
        ]
        group: Any = axis.group
        of_receives = [group.recv([own.tensor], own.member, TAG) for own in host]
        copies = [_on_host(letter, copy=True) for letter in sends]
        of_sends = [group.send([own.tensor], own.member, TAG) for own in copies]
        sends = copies
        wait = complete
    kept: list[Any] = [sends, receives]

    def received() -> None:
        axis.line.wait(number, lambda: _wait(of_receives, wait))
        while staged:
            target, source = staged.pop()
            target.copy_(source)

    def sent() -> None:
        axis.line.wait(number, lambda: _wait(of_sends, wait))
        kept.clear()

    return PendingExchange(received, sent)


def _start_nccl(
    sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], axis: Axis
) -> list[Any]:
    """Start all messages, in the order of member pairs, which is equal on all members. NCCL may
    have to connect each pair first; in different orders, the ranks of a ring would deadlock."""
    letters: list[tuple[Any, PeerMessage]] = [(dist.isend, letter) for letter in sends]
    letters += [(dist.irecv, letter) for letter in receives]
    letters.sort(key=lambda each: sorted((axis.index, each[1].member)))
    operations = [
        dist.P2POp(of, letter.tensor, group=axis.group, group_peer=letter.member)
        for of, letter in letters
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _on_host(letter: PeerMessage, *, copy: bool = False) -> PeerMessage:
    """Return the message with host memory, because gloo sends only from host memory. With `copy`, a
    GPU tensor's values are copied."""
    if not letter.tensor.is_cuda:
        return letter
    near = letter.tensor.cpu() if copy else torch.empty_like(letter.tensor, device="cpu")
    return letter._replace(tensor=near)


def _wait(works: list[Any], wait: Callable[[Any], object]) -> None:
    while works:
        wait(works.pop(0))
