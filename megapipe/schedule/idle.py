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
from itertools import islice
from typing import NamedTuple

from megapipe.schedule.cost import Time
from megapipe.schedule.edges import LOW, UNIT_SHIFT, UNITS, Edges
from megapipe.schedule.ir import JOINED, KIND_MASK, Kind
from megapipe.schedule.simulate import Timeline
from megapipe.schedule.ticks import room


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
    lists = [edges.tokens(rank) for rank in range(len(timeline.start_ticks))]
    made = _made(edges, lists, timeline)
    begin, finish = timeline.begin_ticks, timeline.finish_ticks
    result = []
    for tokens, starts, ends in zip(lists, timeline.start_ticks, timeline.end_ticks, strict=True):
        if not starts:
            result.append(Idle(0, 0, timeline.makespan, 0))
            continue
        first_back, last_forward = _phases(tokens)
        warmup = starts[0] - begin
        drain = finish - ends[-1]
        waiting: Time = 0
        imbalance: Time = 0
        for index, (start, before) in enumerate(
            zip(islice(starts, 1, None), ends, strict=False), 1
        ):
            if start <= before:
                continue
            if index <= first_back:
                warmup += start - before
            elif index > last_forward:
                drain += start - before
            else:
                ready = before
                for token in tokens[index : index + 2 if tokens[index] >= JOINED else index + 1]:
                    ready = max(ready, made[edges.needed(token)])
                under_way = max(start - ready, 0)
                waiting += under_way
                imbalance += start - before - under_way
        result.append(Idle(*map(timeline.time, (warmup, waiting, drain, imbalance))))
    return tuple(result)


def typical_latency(timeline: Timeline) -> Time:
    """The time from the end of an operation to the start of one that it kept waiting on another
    rank: the (upper) median over all that waited, 0 where none did.

    An operation waited for its message if its rank was idle when that was sent.
    """
    edges = Edges(timeline.schedule)
    lists = [edges.tokens(rank) for rank in range(len(timeline.start_ticks))]
    made = _made(edges, lists, timeline)
    waited = []
    for tokens, starts, ends in zip(lists, timeline.start_ticks, timeline.end_ticks, strict=True):
        for token, start, before in zip(tokens[1:], islice(starts, 1, None), ends, strict=False):
            sent = made[edges.needed(token)]
            if edges.incoming[token & LOW] is not None and sent > before:
                waited.append(start - sent)
    return timeline.time(max(0, sorted(waited)[len(waited) // 2])) if waited else 0


def _made(edges: Edges, lists: Sequence[Sequence[int]], timeline: Timeline) -> Sequence[Time]:
    """By slot, when what operations make was there, in ticks; what is always there, at the
    beginning."""
    make_base = edges.base[1]
    made = room(timeline.begin_ticks, edges.slots, timeline.finish_ticks)
    for tokens, ends in zip(lists, timeline.end_ticks, strict=True):
        for token, end in zip(tokens, ends, strict=True):
            made[make_base[token & LOW] + (token >> UNIT_SHIFT & UNITS)] = end
    return made


def _phases(tokens: Sequence[int]) -> tuple[int, int]:
    """Index of the first backward and of the last forward; 0 and the last without a backward."""
    backwards = [i for i, token in enumerate(tokens) if token & KIND_MASK in (Kind.I, Kind.B)]
    forwards = [i for i, token in enumerate(tokens) if token & KIND_MASK == Kind.F]
    return (backwards or [0])[0], (forwards if backwards else [len(tokens)])[-1]
