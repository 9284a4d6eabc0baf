"""Simulated time of a ring plan: when ranks compute, and when they wait for messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from megapipe.context.plan import KINDS, Kind, Message, Plan


class MessageLink(NamedTuple):
    """The link that a message takes, and how long the message takes."""

    name: Hashable
    """Name of the link. Over a link a rank sends, and receives, one message at a time."""
    seconds: float


class PlanTiming(NamedTuple):
    """Seconds that a forward or backward of a ring plan takes."""

    whole: float
    """Seconds until the last rank has finished."""
    busy: float
    """Seconds that a rank computes, averaged over the ranks."""

    @property
    def exposed(self) -> float:
        """Seconds that messages, uneven work and uneven rounds add to the mean computing time."""
        return self.whole - self.busy


def simulate(
    plan: Plan,
    messages: Sequence[Sequence[Message]],
    work: Callable[[int, int], float],
    link: Callable[[Message], MessageLink],
) -> PlanTiming:
    """Simulate the forward or the backward of `plan`. Its `messages` are in flight while ranks
    compute.

    `work(i, j)` gives the seconds for queries of rank i and keys of rank j, `link` the link and
    seconds of a message. A message is sent in its exchange as soon as the source has the content,
    the target takes part in the exchange, and the link is free at both ends.
    """
    clock = [0.0] * plan.ranks
    busy = [0.0] * plan.ranks
    arrived: dict[tuple[str, Kind, int, int], float] = defaultdict(float)
    """Arrival time in seconds of each message, by (what, kind, owner, target)."""
    free: dict[tuple[str, Hashable, int], float] = defaultdict(float)
    for number in range(max(plan.length, len(messages))):
        here = messages[number] if number < len(messages) else ()
        posted = list(clock)
        for message in here:  # the source may still be receiving the content
            came = arrived[message.what, message.kind, message.owner, message.source]
            posted[message.source] = max(posted[message.source], came)
        for message in here:
            hop = link(message)
            ends = ("out", hop.name, message.source), ("in", hop.name, message.target)
            start = max(posted[message.source], posted[message.target], *(free[e] for e in ends))
            at = (message.what, message.kind, message.owner, message.target)
            arrived[at] = max(arrived[at], start + hop.seconds)
            for end in ends:
                free[end] = start + hop.seconds
        if number < plan.length:
            for rank, pair in enumerate(plan.rounds[number]):
                clock[rank] = max(clock[rank], posted[rank])
                for kind, owner in zip(KINDS, pair or (), strict=False):
                    clock[rank] = max(clock[rank], arrived["bundle", kind, owner, rank])
                seconds = 0.0 if pair is None else work(*pair)
                clock[rank] += seconds
                busy[rank] += seconds
    return PlanTiming(max([*clock, *arrived.values()]), sum(busy) / plan.ranks)
