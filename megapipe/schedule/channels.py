"""Channels of a schedule: how many messages each carries, and how many wait at the receiver.

A channel is FIFO. So before an operation a rank receives the message that the operation needs and
all earlier messages of the channel; see :mod:`megapipe.schedule.lower`.
"""

from array import array
from typing import NamedTuple

from megapipe.schedule.dependencies import (
    LOW,
    WORK_ITEM_MASK,
    WORK_ITEM_SHIFT,
    Dependencies,
    RankPair,
)
from megapipe.schedule.ir import JOINED, Schedule


class Channel(NamedTuple):
    """A one-way channel between two ranks."""

    src: int
    dst: int
    messages: int
    """Number of messages per step."""
    depth: int
    """Maximum number of messages received and not yet consumed. A message is consumed when the
    operation that needs it has ended."""


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """List the channels that a valid schedule uses, sorted by source and destination."""
    dependencies = Dependencies(schedule)
    lists = [dependencies.codes(rank) for rank in range(schedule.placement.ranks)]
    make_base = dependencies.base[1]
    sent: dict[RankPair, int] = {}
    number = array("i", bytes(4 * dependencies.slots))
    """Index of each message in its channel, from 1, by the number of the result that is sent."""
    for codes in lists:
        for code in codes:
            line = dependencies.outgoing[code & LOW]
            if line is not None:
                sent[line] = number[
                    make_base[code & LOW] + (code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK)
                ] = sent.get(line, 0) + 1
    taken, consumed, depth = (dict.fromkeys(sent, 0) for _ in range(3))
    for codes in lists:
        for index, code in enumerate(codes):
            if code >= JOINED:  # the inputs of both operations are received before either runs
                after = codes[index + 1]
                line = dependencies.incoming[after & LOW]
                if line is not None:
                    taken[line] = max(taken[line], number[dependencies.needed(after)])
            line = dependencies.incoming[code & LOW]
            if line is not None:
                taken[line] = max(taken[line], number[dependencies.needed(code)])
                depth[line] = max(depth[line], taken[line] - consumed[line])
                consumed[line] += 1
    return tuple(Channel(*line, sent[line], depth[line]) for line in sorted(sent))
