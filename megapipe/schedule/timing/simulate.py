"""Simulation: when each operation of a schedule runs, given the costs of operations and messages.

Every rank runs its list in order and starts an operation as soon as the one before it has ended and
its input has arrived. So each start is the longest path to the operation: one pass, without an
event queue.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time, ratio
from megapipe.schedule.data_parallel import REPLICAS, ReplicaPolicy
from megapipe.schedule.dependencies import LOW, WORK_ITEM_MASK, WORK_ITEM_SHIFT, Dependencies
from megapipe.schedule.ir import JOINED, Schedule
from megapipe.schedule.timing.data_parallel import Interval, complete, make_lanes
from megapipe.schedule.timing.ticks import (
    Scaled,
    add,
    kept,
    later,
    listed,
    scaled,
    signs,
    total,
    unpacked,
)
from megapipe.schedule.timing.times import OpTimes
from megapipe.schedule.wavefront import Wavefront


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. Times are exact if the costs are whole numbers or fractions."""

    schedule: Schedule
    start_ticks: tuple[Sequence[Time], ...]
    """start_ticks[rank][n] is the start of operation n in the rank's list; the step begins at 0.
    Two joined operations start and end together."""
    end_ticks: tuple[Sequence[Time], ...]
    cost: Cost
    gather_ticks: tuple[Interval, ...] = ()
    """All-gathers of parameters, sorted by rank and start; empty if they take no time."""
    reduction_ticks: tuple[Interval, ...] = ()
    """Reductions of gradients on each holder of a stage, sorted by start; empty if
    instantaneous."""
    policy: ReplicaPolicy = REPLICAS
    per_unit: int = 1
    """Number of ticks per unit of the costs' time. Times without "ticks" in their names are in the
    unit of the costs."""

    @cached_property
    def starts(self) -> tuple[Sequence[Time], ...]:
        """starts[rank][n] is the start of operation n in the rank's list."""
        return self._times(self.start_ticks)

    @cached_property
    def ends(self) -> tuple[Sequence[Time], ...]:
        """ends[rank][n] is the end of operation n in the rank's list."""
        return self._times(self.end_ticks)

    def _times(self, ticks: tuple[Sequence[Time], ...]) -> tuple[Sequence[Time], ...]:
        if self.per_unit == 1:
            return ticks
        return tuple(Scaled(each, self.per_unit) for each in ticks)

    @cached_property
    def gathers(self) -> tuple[Interval, ...]:
        """All-gathers of parameters, sorted by rank and start."""
        return tuple(each.scaled(self.per_unit) for each in self.gather_ticks)

    @cached_property
    def reductions(self) -> tuple[Interval, ...]:
        """Reductions of gradients, one entry per holder of the stage, sorted by start."""
        return tuple(each.scaled(self.per_unit) for each in self.reduction_ticks)

    @cached_property
    def begin_ticks(self) -> Time:
        """Earliest start of all operations and gathers."""
        return min([self._first, *(each.start for each in self.gather_ticks)])

    @cached_property
    def finish_ticks(self) -> Time:
        """Latest end of all operations and reductions."""
        return max([self._last, *(each.end for each in self.reduction_ticks)])

    @property
    def _first(self) -> Time:
        return min(starts[0] for starts in self.start_ticks if starts)

    @property
    def _last(self) -> Time:
        return max(ends[-1] for ends in self.end_ticks if ends)

    def time(self, ticks: Time) -> Time:
        """Convert ticks to the unit of the costs."""
        return scaled(ticks, self.per_unit)

    @property
    def begin(self) -> Time:
        """Earliest start of all operations and gathers."""
        return self.time(self.begin_ticks)

    @property
    def makespan(self) -> Time:
        """Time from the first start to the last end over all ranks, with gathers and reductions."""
        return self.time(self.finish_ticks - self.begin_ticks)

    @property
    def exposed_gather(self) -> Time:
        """Time before the first operation on any rank, in which only gathers run."""
        return self.time(self._first - self.begin_ticks)

    @property
    def exposed_reduce(self) -> Time:
        """Time after the last operation on any rank, in which only reductions run."""
        return self.time(self.finish_ticks - self._last)

    @cached_property
    def spans(self) -> tuple[Time, ...]:
        """Time of each rank from the start of its first operation to the end of its last, without
        gathers before and reductions after; 0 for a rank without operations."""
        return tuple(
            self.time(ends[-1] - starts[0]) if ends else 0
            for starts, ends in zip(self.start_ticks, self.end_ticks, strict=True)
        )

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """Time that each rank computes."""
        return tuple(
            self.time(total(ends) - total(starts) - self._twice(rank))
            for rank, (starts, ends) in enumerate(
                zip(self.start_ticks, self.end_ticks, strict=True)
            )
        )

    def _twice(self, rank: int) -> Time:
        """Return the ticks that a sum over a rank's operations counts twice: both operations of a
        joined pair have the same start and end."""
        codes = self.schedule.ops[rank]
        if not codes or max(codes) < JOINED:
            return 0
        both = zip(self.start_ticks[rank], self.end_ticks[rank], codes, strict=True)
        return sum(end - start for start, end, code in both if code >= JOINED)

    @property
    def bubble_makespan(self) -> Time:
        """Share of the makespan without computation, over all ranks."""
        return 1 - ratio(sum(self.busy), len(self.busy) * self.makespan)

    def idle_between(self, begin: Time, end: Time) -> float:
        """Return the idle share from `begin` to `end` over all ranks. No operations may be
        joined."""
        busy = sum(
            max(0.0, float(min(stop, end)) - float(max(start, begin)))
            for starts, ends in zip(self.starts, self.ends, strict=True)
            for start, stop in zip(starts, ends, strict=True)
        )
        return 1 - busy / (len(self.starts) * float(end - begin))

    @property
    def bubble_ideal(self) -> Time:
        """Idle time within the makespan divided by compute time, over all ranks: the bubble
        fraction of Narayanan et al., 2104.04473."""
        return ratio(len(self.busy) * self.makespan, sum(self.busy)) - 1

    @property
    def bubble_span(self) -> Time:
        """Idle share of the longest span (:attr:`spans`), over all ranks: the bubble rate of Qi et
        al., 2401.10241. It is real only if a rank can begin its next step before others end this
        one."""
        return 1 - ratio(sum(self.busy), len(self.busy) * max(self.spans))


def simulate(
    schedule: Schedule, cost: Cost | None = None, policy: ReplicaPolicy = REPLICAS
) -> Timeline:
    """Simulate a valid schedule. By default F = I = W = 1, B = 2, R = 1, and messages, gathers and
    reductions take no time. `policy` says when replicas gather and reduce
    (:mod:`megapipe.schedule.timing.data_parallel`).

    Raises:
        ScheduleError: a cost that does not fit the stages, or a schedule that deadlocks
            (:func:`~megapipe.schedule.proof.validate.validate` says where).
    """
    cost = cost or Cost()
    dependencies = Dependencies(schedule)
    lists = [dependencies.codes(rank) for rank in range(schedule.placement.ranks)]
    times = OpTimes(dependencies, cost, policy)
    beside = [] if schedule.updates else make_lanes(schedule, times)
    lag, hold, together = times.lag, times.hold, times.together
    need_base, make_base = dependencies.base
    lengths = [times.by_operation(rank, codes) for rank, codes in enumerate(lists)]
    starts: list[list[Time]]
    ends: list[list[Time]]
    free: list[Time]
    if not beside and Wavefront.suits(dependencies, lists):
        starts, ends, free, finished = _abreast(Wavefront(dependencies, lists), times, lengths)
    else:
        finished = times.many(-1, dependencies.slots)
        for result in dependencies.always_ready:
            finished[result] = 0
        starts, ends = ([times.kept() for _ in lists] for _ in range(2))
        free = [0] * len(lists)
    length = times.length
    stops = list(map(len, lists))
    for lane in beside:
        stops[lane.rank] = lane.next_stop
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(lists)))
    while ready:
        rank = ready.pop()
        my_starts, my_ends, my_lengths = starts[rank], ends[rank], lengths[rank]
        now = free[rank]
        codes = lists[rank]
        index, stop = len(my_ends), stops[rank]
        while index < stop:
            code = codes[index]
            low = code & LOW
            item = code >> WORK_ITEM_SHIFT & WORK_ITEM_MASK
            arrived = finished[need_base[low] + item]
            if arrived < 0:
                result = need_base[low] + item
                if result >= dependencies.totals:
                    if low in dependencies.together:
                        arrival = dependencies.arrival(code, rank)
                        finished[arrival] = max(0, now - lag[low])  # no message is sent for it
                        ready += waiting.pop(arrival, ())
                    inputs = dependencies.inputs_of(code)
                    result = min(inputs, key=finished.__getitem__)
                    if finished[result] >= 0:
                        arrived = max(finished[each] for each in inputs)
            if arrived < 0:
                waiting.setdefault(result, []).append(rank)
                break
            start = arrived + lag[low]
            if start < now:
                start = now
            if code < JOINED:
                now = start + (length[low] if my_lengths is None else my_lengths[index])
                my_starts.append(start)
                my_ends.append(now)
                now += hold[low]
                result = make_base[low] + item
                finished[result] = now
                if result in waiting:
                    ready += waiting.pop(result)
                index += 1
                continue
            second = codes[index + 1]
            other, after = second & LOW, second >> WORK_ITEM_SHIFT & WORK_ITEM_MASK
            arrived = finished[need_base[other] + after]
            if arrived < 0:
                waiting.setdefault(need_base[other] + after, []).append(rank)
                break
            start = max(start, arrived + lag[other])
            if my_lengths is None:
                now = start + together(length[low], length[other])
            else:
                now = start + together(my_lengths[index], my_lengths[index + 1])
            my_starts.extend((start, start))
            my_ends.extend((now, now))
            now += hold[low] + hold[other]
            for result in (make_base[low] + item, make_base[other] + after):
                finished[result] = now
                if result in waiting:
                    ready += waiting.pop(result)
            index += 2
        else:
            if beside and beside[rank].stops and not beside[rank].held:
                began, ended = (my_starts[-1], my_ends[-1]) if my_ends else (0, 0)
                now, going = beside[rank].act(began, ended, now)
                stops[rank] = beside[rank].next_stop
                ready.extend(going)
        free[rank] = now
    if waiting:
        raise ScheduleError(f"schedule {schedule.name}: it deadlocks, so it has no timeline")
    between = complete(beside)
    return Timeline(schedule, tuple(starts), tuple(ends), cost, *between, policy, times.per_unit)


def _abreast(
    front: Wavefront, times: OpTimes, lengths: list[list[Time] | None]
) -> tuple[list[list[Time]], list[list[Time]], list[Time], list[Time]]:
    """Run rounds (:class:`.Wavefront`) as far as possible. Return, per rank, the starts and ends of
    the operations that have run, and the time at which the rank can continue; also the time of each
    result, if operations are left to run. The loop would compute bitwise the same times."""
    lag, length, hold = map(times.numbers, (times.lag, times.length, times.hold))
    given = [times.numbers(each) for each in lengths if each is not None]
    taken = np.concatenate(given) if given else None
    made = np.repeat(times.numbers([-1]), times.dependencies.slots)
    made[times.dependencies.always_ready] = times.numbers([0])
    starts, ends = (np.empty(len(front.low), lag.dtype) for _ in range(2))
    free = times.numbers([0] * len(lengths))
    for ranks, places, needs in front.rounds(signs(made)):
        low = front.low[places]
        start = later(add(made[needs], lag[low]), free[ranks])
        end = add(start, length[low] if taken is None else taken[places])
        starts[places], ends[places] = start, end
        free[ranks] = made[front.make[places]] = add(end, hold[low])
    finished = listed(made) if front.left else []
    ran = front.ran
    del front, made  # millions: keep no more at a time than necessary
    own_starts = [kept(starts[own]) for own in ran]
    del starts
    return own_starts, [kept(ends[own]) for own in ran], unpacked(free), finished
