"""A few update windows in the middle of a no-flush schedule, as a schedule to time and draw."""

from dataclasses import dataclass
from itertools import accumulate

from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, finite, parts
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import Kind, Schedule, Updates, packed
from megapipe.schedule.timing.simulate import Timeline, simulate


@dataclass(frozen=True)
class Excerpt:
    """Consecutive update windows of a no-flush schedule, taken from a run by :func:`excerpt`."""

    schedule: Schedule
    """Schedule of the excerpt: per rank the forwards in flight at the beginning, then the
    operations of the windows."""
    in_flight: tuple[int, ...]
    """Number of forwards in flight at the beginning, per rank; they count as done."""
    cuts: tuple[int, ...]
    """Indices in the first rank's list at which the windows begin, and the length of the list."""
    whole: Schedule
    """Schedule of a run that contains the windows of the excerpt."""
    offsets: tuple[int, ...]
    """Index in each rank's list of `whole` at which the excerpt begins."""

    def simulated(self, cost: Cost) -> Timeline:
        """Simulate `whole` and return the timeline of the excerpt."""
        timeline = simulate(self.whole, cost)
        starts, ends = [], []
        for rank, (offset, before) in enumerate(zip(self.offsets, self.in_flight, strict=True)):
            stop = offset + len(self.schedule.ops[rank]) - before
            own = list(timeline.starts[rank])[offset:stop]
            starts.append([own[0]] * before + own)
            ends.append([own[0]] * before + list(timeline.ends[rank])[offset:stop])
        return Timeline(self.schedule, tuple(starts), tuple(ends), cost)

    def span(self, timeline: Timeline, number: int) -> tuple[Time, Time]:
        """Return when update window `number`, counted from 0 within the excerpt, begins and ends on
        the first rank.

        The first rank finishes a window last: all other ranks have begun the next window by then.
        """
        starts, ends = timeline.starts[0], timeline.ends[0]
        begin, end = self.cuts[number : number + 2]
        return ends[begin - 1] if number else starts[begin], ends[end - 1]


def excerpt(stream: AsyncSchedule, windows: int, first: int, last: int) -> Excerpt:
    """Take update windows `first` to `last` of a run of `windows` windows.

    The run is shortened first: windows far before and after them are omitted, as they equal nearer
    windows. Micro-batches and versions are numbered in the shorter run.
    """
    margin = stream.ahead + 2
    left_out = max(0, first - margin)
    first, last = first - left_out, last - left_out
    length = min(windows - left_out, last + 1 + margin)
    whole = finite(stream, length)
    assert whole.updates is not None
    ops, reads, in_flight, offsets, cuts = [], [], [], [], list[int]()
    for rank, own in enumerate(parts(stream, length)):
        stops = list(accumulate(len(steps) for _, steps in own))
        start, stop = stops[first], stops[last + 1]
        listed = whole.rank_ops(rank)
        done = {(op.stage, op.microbatch) for op in listed[:start] if op.kind == Kind.B}
        picked = [
            number
            for number, op in enumerate(listed[:start])
            if op.kind == Kind.F and (op.stage, op.microbatch) not in done
        ]
        in_flight.append(len(picked))
        offsets.append(start)
        if rank == 0:
            cuts = [len(picked) + each - start for each in stops[first : last + 2]]
        picked += range(start, stop)
        ops.append(packed(whole.ops[rank][number] for number in picked))
        reads.append(tuple(whole.updates.reads[rank][number] for number in picked))
    schedule = Schedule(
        name=stream.name,
        placement=stream.placement,
        microbatches=whole.microbatches,
        ops=tuple(ops),
        updates=Updates(window=stream.microbatches, reads=tuple(reads)),
    )
    return Excerpt(schedule, tuple(in_flight), tuple(cuts), whole, tuple(offsets))
