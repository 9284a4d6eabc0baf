"""Messages between members of a group that leave and are expected at the same time."""

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
"""Of these messages on gloo; :mod:`megapipe.distributed.gloo` has others."""


class PeerMessage(NamedTuple):
    """A tensor for a member of the group, or the memory for one from it."""

    tensor: Tensor
    member: int


class PendingExchange(NamedTuple):
    """Messages on their way."""

    received: Callable[[], None]
    """Waits for what is expected."""
    sent: Callable[[], None]
    """Waits until what was sent may be changed."""


def start_exchange(
    sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], axis: Axis
) -> PendingExchange:
    """Begin to send and to receive. All members call it equally often.

    Between two members, letters are received in the order in which they are sent. On NCCL they are
    one group of operations, and as safe as a collective: whatever holds up the host of one member
    until it is over (a kernel that is loaded, say), the others begin it all the same, as they need
    nothing of that host for it but what came before.
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
    """Letters of a pair of members are in one order of pairs on all of them: where each pair has to
    be connected first, ranks of a ring would else wait for each other all around."""
    letters: list[tuple[Any, PeerMessage]] = [(dist.isend, letter) for letter in sends]
    letters += [(dist.irecv, letter) for letter in receives]
    letters.sort(key=lambda each: sorted((axis.index, each[1].member)))
    operations = [
        dist.P2POp(of, letter.tensor, group=axis.group, group_peer=letter.member)
        for of, letter in letters
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _on_host(letter: PeerMessage, *, copy: bool = False) -> PeerMessage:
    """The letter, or one in host memory for it: gloo sends no other."""
    if not letter.tensor.is_cuda:
        return letter
    near = letter.tensor.cpu() if copy else torch.empty_like(letter.tensor, device="cpu")
    return letter._replace(tensor=near)


def _wait(works: list[Any], wait: Callable[[Any], object]) -> None:
    while works:
        wait(works.pop(0))
