"""Idle time of ranks, by cause.

Within the makespan a rank's time without computation has four causes:

- *warm-up*: before the first backward of the rank starts;
- *drain*: after its last forward has ended, exposed reductions included;
- *waiting*, in between: the message that the next operation needs is in flight (or is being sent,
  if messages do not overlap with computation), the parameters of its stage are gathered, or a
  reduction has to end first;
- *imbalance*, in between: the operation that makes the needed message has not ended yet, or
  another rank has not come to an operation that all ranks run at once.

A rank without a backward has warm-up until its first operation and drain after its last.
"""

from array import array
from collections.abc import Sequence
from functools import reduce
from itertools import islice
from typing import NamedTuple, cast

import numpy as np

from megapipe.schedule.cost import Time
from megapipe.schedule.dependencies import LOW, WORK_ITEM_MASK, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, KIND_MASK, Kind
from megapipe.schedule.timing.simulate import Timeline
from megapipe.schedule.timing.ticks import (
    Numbers,
    Wide,
    differences,
    later,
    total,
    unpacked,
)


class Idle(NamedTuple):
    """Idle time of a rank within the makespan, by cause."""

    warmup: Time
    waiting: Time
    drain: Time
    imbalance: Time


def idle(timeline: Timeline) -> tuple[Idle, ...]:
    """Return the idle time by cause, per rank, for a simulated or a measured timeline.

    The four causes add up to the makespan minus busy time.
    """
    dependencies = Dependencies(timeline.schedule)
    need = np.array(dependencies.base[0])
    lists = [dependencies.codes(rank) for rank in range(len(timeline.start_ticks))]
    made = _made(dependencies, lists, timeline)
    result = []
    for listed, starts, ends in zip(lists, timeline.start_ticks, timeline.end_ticks, strict=True):
        if not starts:
            result.append(Idle(0, 0, timeline.makespan, 0))
            continue
        codes, begins = np.array(listed), _numbers(starts)
        gaps = differences(begins[1:], _numbers(ends)[:-1])
        places = np.flatnonzero(gaps > 0) + 1  # of operations that start late
        gaps = gaps[places - 1]
        first_back, last_forward = _phases(codes)
        early = places <= first_back
        late = ~early & (places > last_forward)
        between = ~(early | late)
        places, gaps, early, late = places[between], gaps[between], gaps[early], gaps[late]
        ready = _made_for(codes[places], need, made)
        joined = codes[places] >= JOINED
        ready[joined] = later(ready[joined], _made_for(codes[places[joined] + 1], need, made))
        if dependencies.together:
            met = np.isin(codes[places] & LOW, list(dependencies.together))
            _set_last_arrivals(dependencies, codes[places], met, made, ready)
        under_way = np.clip(differences(begins[places], ready), 0, gaps)
        causes = (
            starts[0] - timeline.begin_ticks + total(early),
            total(under_way),
            timeline.finish_ticks - ends[-1] + total(late),
            total(gaps) - total(under_way),
        )
        result.append(Idle(*map(timeline.time, causes)))
    return tuple(result)


def _set_last_arrivals(
    dependencies: Dependencies, codes: Numbers, met: Numbers, made: Numbers, ready: Numbers
) -> None:
    """Set `ready` of the operations that all ranks run at once (`met`) to the time at which their
    input was made and all ranks had come to them."""
    inputs = [dependencies.inputs_of(code) for code in codes[met].tolist()]
    if inputs:
        ready[met] = reduce(later, (made[column] for column in np.array(inputs).T))


def typical_latency(timeline: Timeline) -> Time:
    """Return the median message latency: the time from the end of an operation to the start of the
    operation on another rank that waited for its message.

    An operation waited for its message if its rank was idle when the message was sent. The median
    is the upper one for an even number of operations, and 0 if no operation waited.
    """
    dependencies = Dependencies(timeline.schedule)
    lists = [dependencies.codes(rank) for rank in range(len(timeline.start_ticks))]
    made = unpacked(_made(dependencies, lists, timeline))
    waited = []
    for listed, starts, ends in zip(lists, timeline.start_ticks, timeline.end_ticks, strict=True):
        for code, start, before in zip(listed[1:], islice(starts, 1, None), ends, strict=False):
            sent = made[dependencies.chained(code)]
            if dependencies.incoming[code & LOW] is not None and sent > before:
                waited.append(start - sent)
    return timeline.time(max(0, sorted(waited)[len(waited) // 2])) if waited else 0


def _made(dependencies: Dependencies, lists: Sequence["array[int]"], timeline: Timeline) -> Numbers:
    """Return the time, in ticks, at which each result is made, by result number; for results that
    always exist, the beginning of the timeline."""
    make = np.array(dependencies.base[1])
    columns = [_numbers(ends) for ends in timeline.end_ticks]
    made = np.empty(dependencies.slots, np.result_type(*columns))
    begin = [timeline.begin_ticks]
    wide = made.dtype.kind == "V"
    made[:] = Wide(made.itemsize // 8, cast("list[int]", begin)).rows if wide else begin
    for listed, ends in zip(lists, columns, strict=True):
        codes = np.array(listed, np.int64)
        made[make[codes & LOW] + (codes >> WORK_ITEM_SHIFT & WORK_ITEM_MASK)] = ends
    for rank, (listed, ends) in enumerate(zip(lists, columns, strict=True)):
        for index, code in enumerate(listed if dependencies.together else ()):
            if index and code & LOW in dependencies.together:
                made[dependencies.arrival(code, rank)] = ends[index - 1]
    return made


def _made_for(codes: Numbers, need: Numbers, made: Numbers) -> Numbers:
    """Return the time at which the input of each operation in `codes` was made."""
    return made[need[codes & LOW] + (codes >> WORK_ITEM_SHIFT & WORK_ITEM_MASK)]


def _numbers(times: Sequence[Time]) -> Numbers:
    """Return times as an array; its elements are Python numbers if the times are not packed."""
    if isinstance(times, Wide):
        return times.rows
    return np.array(times) if isinstance(times, array) else np.array(list(times), object)


def _phases(listed: Numbers) -> tuple[int, int]:
    """Return the indices of the first backward and the last forward in a list of codes; without a
    backward, 0 and the length of the list."""
    kinds = listed & KIND_MASK
    backwards = np.flatnonzero((kinds == Kind.I) | (kinds == Kind.B))
    forwards = np.flatnonzero(kinds == Kind.F)
    if not len(backwards):
        return 0, len(listed)
    return int(backwards[0]), int(forwards[-1])
