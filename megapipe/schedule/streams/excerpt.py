"""A few windows in the middle of a stream, as a schedule of their own to time and to draw."""

from dataclasses import dataclass
from itertools import accumulate

from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import Kind, Schedule, Updates, packed
from megapipe.schedule.streams.stream import AsyncSchedule, finite, parts
from megapipe.schedule.timing.simulate import Timeline, simulate


@dataclass(frozen=True)
class Excerpt:
    """Some windows of a stream; see :func:`excerpt`."""

    schedule: Schedule
    """On each rank the forwards in flight at the beginning, and then all of the windows."""
    in_flight: tuple[int, ...]
    """Per rank, how many forwards these are: they are taken to be done at the beginning."""
    cuts: tuple[int, ...]
    """The places in the first rank's list at which the windows begin, and its end."""
    whole: Schedule
    """A run in which these windows are."""
    places: tuple[int, ...]
    """Per rank, the place in the run's list at which they begin."""

    def simulated(self, cost: Cost) -> Timeline:
        """These windows in a simulation of the run."""
        timeline = simulate(self.whole, cost)
        starts, ends = [], []
        for rank, (place, before) in enumerate(zip(self.places, self.in_flight, strict=True)):
            stop = place + len(self.schedule.ops[rank]) - before
            own = list(timeline.starts[rank])[place:stop]
            starts.append([own[0]] * before + own)
            ends.append([own[0]] * before + list(timeline.ends[rank])[place:stop])
        return Timeline(self.schedule, tuple(starts), tuple(ends), cost)

    def span(self, timeline: Timeline, number: int) -> tuple[Time, Time]:
        """When one of the windows, by its place among them, begins and ends on the first rank.

        That rank is the last one to be through with a window: all others have begun the next one
        by then.
        """
        starts, ends = timeline.starts[0], timeline.ends[0]
        begin, end = self.cuts[number : number + 2]
        return ends[begin - 1] if number else starts[begin], ends[end - 1]


def excerpt(stream: AsyncSchedule, windows: int, first: int, last: int) -> Excerpt:
    """Windows `first` to `last` of a run of so many windows. Micro-batches and versions are counted
    as in a run that leaves out windows before and behind which are like others."""
    margin = stream.ahead + 2
    left_out = max(0, first - margin)
    first, last = first - left_out, last - left_out
    length = min(windows - left_out, last + 1 + margin)
    whole = finite(stream, length)
    assert whole.updates is not None
    ops, reads, in_flight, places, cuts = [], [], [], [], list[int]()
    for rank, own in enumerate(parts(stream, length)):
        stops = list(accumulate(len(steps) for _, steps in own))
        place, stop = stops[first], stops[last + 1]
        listed = whole.rank_ops(rank)
        done = {(op.stage, op.microbatch) for op in listed[:place] if op.kind == Kind.B}
        picked = [
            number
            for number, op in enumerate(listed[:place])
            if op.kind == Kind.F and (op.stage, op.microbatch) not in done
        ]
        in_flight.append(len(picked))
        places.append(place)
        if rank == 0:
            cuts = [len(picked) + each - place for each in stops[first : last + 2]]
        picked += range(place, stop)
        ops.append(packed(whole.ops[rank][number] for number in picked))
        reads.append(tuple(whole.updates.reads[rank][number] for number in picked))
    schedule = Schedule(
        name=stream.name,
        placement=stream.placement,
        microbatches=whole.microbatches,
        ops=tuple(ops),
        updates=Updates(window=stream.microbatches, reads=tuple(reads)),
    )
    return Excerpt(schedule, tuple(in_flight), tuple(cuts), whole, tuple(places))
