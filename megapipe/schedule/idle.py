"""Why ranks are idle.

Within the makespan a rank's time that is not computation is

- *warm-up*: before the first backward of the rank starts;
- *drain*: after its last forward has ended, with the reductions that nothing hides;
- and in between *waiting*, while the message that the next operation needs is on its way (or is
  being sent, where messages do not overlap with computation), the parameters of its stage are
  gathered or a reduction is to be over first, and *imbalance*, while the operation that makes the
  message has not ended yet.

A rank without a backward has warm-up until its first operation and drain after its last.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megapipe.schedule.cost import Time
from megapipe.schedule.edges import LOW, UNIT_SHIFT, UNITS, Edges
from megapipe.schedule.ir import JOINED, KIND_MASK, Kind
from megapipe.schedule.simulate import Timeline


class Idle(NamedTuple):
    """Idle time of a rank within the makespan, by cause."""

    warmup: Time
    waiting: Time
    drain: Time
    imbalance: Time


def idle(timeline: Timeline) -> tuple[Idle, ...]:
    """Idle time by cause, per rank; of a simulated or a measured timeline.

    The four add up to makespan less busy time.
    """
    edges = Edges(timeline.schedule)
    lists = [edges.tokens(rank) for rank in range(len(timeline.starts))]
    need_base, _ = edges.base
    made = _made(edges, lists, timeline)
    begin, finish = timeline.begin, timeline.finish
    result = []
    for tokens, starts, ends in zip(lists, timeline.starts, timeline.ends, strict=True):
        if not starts:
            result.append(Idle(0, 0, timeline.makespan, 0))
            continue
        first_back, last_forward = _phases(tokens)
        warmup = starts[0] - begin
        drain = finish - ends[-1]
        waiting: Time = 0
        imbalance: Time = 0
        for index in range(1, len(tokens)):
            gap = starts[index] - ends[index - 1]
            if gap <= 0:
                continue
            if index <= first_back:
                warmup += gap
            elif index > last_forward:
                drain += gap
            else:
                ready = ends[index - 1]
                for token in tokens[index : index + 2 if tokens[index] >= JOINED else index + 1]:
                    slot = need_base[token & LOW] + (token >> UNIT_SHIFT & UNITS)
                    ready = max(ready, made.get(slot, begin))
                under_way = max(starts[index] - ready, 0)
                waiting += under_way
                imbalance += gap - under_way
        result.append(Idle(warmup, waiting, drain, imbalance))
    return tuple(result)


def typical_latency(timeline: Timeline) -> Time:
    """The time from the end of an operation to the start of one that it kept waiting on another
    rank: the (upper) median over all that waited, 0 where none did.

    An operation waited for its message if its rank was idle when that was sent.
    """
    edges = Edges(timeline.schedule)
    lists = [edges.tokens(rank) for rank in range(len(timeline.starts))]
    need_base, _ = edges.base
    made = _made(edges, lists, timeline)
    waited = []
    for tokens, starts, ends in zip(lists, timeline.starts, timeline.ends, strict=True):
        for token, start, before in zip(tokens[1:], starts[1:], ends, strict=False):
            sent = made.get(need_base[token & LOW] + (token >> UNIT_SHIFT & UNITS))
            if edges.incoming[token & LOW] is not None and sent is not None and sent > before:
                waited.append(start - sent)
    return max(0, sorted(waited)[len(waited) // 2]) if waited else 0


def _made(edges: Edges, lists: Sequence[Sequence[int]], timeline: Timeline) -> dict[int, Time]:
    """When what operations make was there, by slot."""
    make_base = edges.base[1]
    return {
        make_base[token & LOW] + (token >> UNIT_SHIFT & UNITS): end
        for tokens, ends in zip(lists, timeline.ends, strict=True)
        for token, end in zip(tokens, ends, strict=True)
    }


def _phases(tokens: Sequence[int]) -> tuple[int, int]:
    """Index of the first backward and of the last forward; 0 and the last without a backward."""
    backwards = [i for i, token in enumerate(tokens) if token & KIND_MASK in (Kind.I, Kind.B)]
    forwards = [i for i, token in enumerate(tokens) if token & KIND_MASK == Kind.F]
    return (backwards or [0])[0], (forwards if backwards else [len(tokens)])[-1]
