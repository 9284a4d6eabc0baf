"""The time of a plan: when ranks compute, and when they wait for messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from megapipe.context.plan import KINDS, Kind, Message, Plan


class MessageLink(NamedTuple):
    """The way of a message."""

    name: Hashable
    """A rank sends one message at a time over links of a name, and receives one."""
    seconds: float


class PlanTiming(NamedTuple):
    """Seconds of a forward or backward."""

    whole: float
    """Until the last rank is through."""
    busy: float
    """That a rank computes, on average."""

    @property
    def exposed(self) -> float:
        """Seconds that messages, uneven work and uneven rounds cost."""
        return self.whole - self.busy


def simulate(
    plan: Plan,
    messages: Sequence[Sequence[Message]],
    work: Callable[[int, int], float],
    link: Callable[[Message], MessageLink],
) -> PlanTiming:
    """Time the rounds of `plan` with its `messages`, which travel while ranks compute.

    `work` gives the seconds of a pair (queries, keys), `link` the way of a message. A message
    leaves with the exchange that it is in, once its content is there, its receiver takes part in
    the exchange, and the link is free on both sides.
    """
    clock = [0.0] * plan.ranks
    busy = [0.0] * plan.ranks
    arrived: dict[tuple[str, Kind, int, int], float] = defaultdict(float)
    """By message: what, kind, home, target."""
    free: dict[tuple[str, Hashable, int], float] = defaultdict(float)
    for number in range(max(plan.length, len(messages))):
        here = messages[number] if number < len(messages) else ()
        posted = list(clock)
        for message in here:  # content that is on its way itself
            came = arrived[message.what, message.kind, message.home, message.source]
            posted[message.source] = max(posted[message.source], came)
        for message in here:
            way = link(message)
            ends = ("out", way.name, message.source), ("in", way.name, message.target)
            start = max(posted[message.source], posted[message.target], *(free[e] for e in ends))
            at = (message.what, message.kind, message.home, message.target)
            arrived[at] = max(arrived[at], start + way.seconds)
            for end in ends:
                free[end] = start + way.seconds
        if number < plan.length:
            for rank, pair in enumerate(plan.rounds[number]):
                clock[rank] = max(clock[rank], posted[rank])
                for kind, home in zip(KINDS, pair or (), strict=False):
                    clock[rank] = max(clock[rank], arrived["bundle", kind, home, rank])
                seconds = 0.0 if pair is None else work(*pair)
                clock[rank] += seconds
                busy[rank] += seconds
    return PlanTiming(max([*clock, *arrived.values()]), sum(busy) / plan.ranks)
