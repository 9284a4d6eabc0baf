"""What a schedule keeps in memory and sends, counted from its lists.

Activations are counted in micro-batches of a full rank: what one stage keeps of one whole
micro-batch is ranks / stages of that. There are two accountings, and published tables mix them:

- *held*: from F to W (or B), as whoever keeps the saved tensors until the weight gradient;
- *weighted*: a share is free after I already, the rest after W (2401.10241 counts so).

At a stage that recomputes, what counts begins at R (or at I or B); its input alone is kept before.
"""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Time, plain
from megapipe.schedule.edges import Edges
from megapipe.schedule.ir import KIND_MASK, Kind, Schedule
from megapipe.schedule.simulate import Timeline

Amount = int | Fraction
"""Micro-batches of a full rank."""


class _Change(NamedTuple):
    """What an operation adds to what is alive, when it starts and when it ends."""

    start: Amount
    end: Amount


def most_held(ops: Sequence[int]) -> int:
    """The most chunk activations that a list holds at once, from F to W or B."""
    held = most = 0
    for code in ops:
        kind = code & KIND_MASK
        if kind == Kind.F:
            held += 1
            most = max(most, held)
        elif kind in (Kind.B, Kind.W):
            held -= 1
    return most


def peak_held(schedule: Schedule) -> tuple[Amount, ...]:
    """Per rank, the most activations alive at once, each held from F to W."""
    return peak_weighted(schedule, freed=Fraction(0))


def peak_weighted(schedule: Schedule, freed: Fraction) -> tuple[Amount, ...]:
    """Per rank, the most activations alive at once, I freeing the share `freed` and W the rest.

    Raises:
        ScheduleError: a share that is not from 0 to 1.
    """
    return tuple(
        _whole(_peak(_changes(schedule, rank, freed))) for rank in range(len(schedule.ops))
    )


def _peak(changes: Iterator[_Change]) -> Amount:
    alive = peak = Fraction(0)
    for change in changes:
        peak = max(peak, alive + change.start)
        alive += change.start + change.end
    return peak


def curve(
    timeline: Timeline, rank: int, freed: Fraction = Fraction(0)
) -> list[tuple[Time, Amount]]:
    """The memory of a rank over time: (from when, activations alive), weighted by `freed`."""
    changes = _changes(timeline.schedule, rank, freed)
    events: dict[Time, Amount] = {}
    for start, end, change in zip(timeline.starts[rank], timeline.ends[rank], changes, strict=True):
        events[start] = events.get(start, 0) + change.start
        events[end] = events.get(end, 0) + change.end
    times = sorted(events)
    return [
        (time, _whole(alive))
        for time, alive in zip(times, accumulate(events[time] for time in times), strict=True)
    ]


def messages(schedule: Schedule) -> int:
    """Messages of a step between different ranks."""
    return int(sum(traffic(schedule).values(), start=Fraction(0)))


def traffic(schedule: Schedule) -> dict[tuple[int, int], Fraction | int]:
    """Messages of a step by (source, destination)."""
    return _per_link(schedule, lambda size: 1)


def volume(schedule: Schedule) -> dict[tuple[int, int], Fraction | int]:
    """What a step sends by (source, destination), in messages of a whole micro-batch."""
    return _per_link(schedule, lambda size: size / schedule.slices)


def _per_link(
    schedule: Schedule, of: Callable[[Fraction], Amount]
) -> dict[tuple[int, int], Amount]:
    edges = Edges(schedule)
    ways = 1 if schedule.forward_only else 2
    result: dict[tuple[int, int], Amount] = {}
    counts = (
        [schedule.microbatches]
        if len(edges.lanes) == 1
        else [edges.lane_of.count(index) for index in range(len(edges.lanes))]
    )
    for lane, count in zip(edges.lanes, counts, strict=True):
        row = schedule.placement.table[lane.replica]
        for here, there in pairwise(row):
            if here == there:
                continue
            for link in ((here, there), (there, here))[:ways]:
                sent = count * schedule.slices * of(lane.size)
                result[link] = _whole(result.get(link, 0) + sent)
    return dict(sorted(result.items()))


def weight_copies(schedule: Schedule) -> tuple[Amount, ...]:
    """Per rank, the weights that it holds, 1 being the model by the number of ranks."""
    placement = schedule.placement
    return tuple(
        _whole(len(placement.stages_of(rank)) * placement.unit) for rank in range(placement.ranks)
    )


def _changes(schedule: Schedule, rank: int, freed: Fraction) -> Iterator[_Change]:
    if not 0 <= freed <= 1:
        raise ScheduleError(f"the share freed by I is from 0 to 1, not {freed}")
    units: Sequence[Fraction] = [
        schedule.placement.unit * size / schedule.slices
        for size in (schedule.sizes or [Fraction(1)])
    ]
    ops = schedule.rank_ops(rank)
    ahead = {(op.stage, op.microbatch) for op in ops if op.kind == Kind.R}
    for op in ops:
        unit = units[op.microbatch if schedule.sizes else 0]
        late = op.stage in schedule.recompute
        if op.kind == Kind.F:
            yield _Change(0 if late or schedule.forward_only else unit, 0)
        elif op.kind == Kind.R:
            yield _Change(unit, 0)
        elif op.kind == Kind.W:
            yield _Change(0, -unit * (1 - freed))
        else:
            begins = late and (op.stage, op.microbatch) not in ahead
            yield _Change(unit if begins else 0, -unit if op.kind == Kind.B else -unit * freed)


def _whole(amount: Amount) -> Amount:
    """The same amount, as an int where it is whole."""
    result = plain(amount)
    assert not isinstance(result, float)
    return result
