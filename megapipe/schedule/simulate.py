"""When each operation runs, given what it costs.

Every rank runs its list in order and starts an operation as soon as the one before it has ended
and its input has arrived, so each start is the longest path to it: one pass, no event queue.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.ir import KIND_MASK, MICROBATCH_SHIFT, STAGE_MASK, STAGE_SHIFT, Schedule


@dataclass(frozen=True)
class Timeline:
    """A schedule in time. Times are exact where the costs are whole numbers or fractions."""

    schedule: Schedule
    starts: tuple[list[Time], ...]
    """starts[rank][n] is the start of operation n of the rank; the first start of all is 0."""
    ends: tuple[list[Time], ...]

    @cached_property
    def makespan(self) -> Time:
        """From the first start to the last end over all ranks."""
        first = min(starts[0] for starts in self.starts if starts)
        return max(ends[-1] for ends in self.ends if ends) - first

    @cached_property
    def spans(self) -> tuple[Time, ...]:
        """Per rank, from its own first start to its own last end."""
        return tuple(
            ends[-1] - starts[0] for starts, ends in zip(self.starts, self.ends, strict=True)
        )

    @cached_property
    def busy(self) -> tuple[Time, ...]:
        """Per rank, the time it computes."""
        return tuple(
            sum((end - start for start, end in zip(*both, strict=True)), start=0)
            for both in zip(self.starts, self.ends, strict=True)
        )

    @property
    def bubble_makespan(self) -> Time:
        """Idle share of the makespan, over all ranks."""
        return 1 - _ratio(sum(self.busy), len(self.busy) * self.makespan)

    @property
    def bubble_ideal(self) -> Time:
        """Idle time within the makespan relative to the time computed, over all ranks."""
        return _ratio(len(self.busy) * self.makespan, sum(self.busy)) - 1

    @property
    def bubble_span(self) -> Time:
        """Idle share of the longest span, over all ranks: the bubble of 2401.10241, which is
        real only if a rank may begin its next step before the others have ended this one."""
        return 1 - _ratio(sum(self.busy), len(self.busy) * max(self.spans))


def simulate(schedule: Schedule, cost: Cost | None = None) -> Timeline:
    """Time a valid schedule; the default cost is F = I = W = 1, B = 2, no latency.

    Raises:
        ScheduleError: a cost that does not fit the stages, or a schedule that deadlocks
            (:func:`~megapipe.schedule.validate.validate` says where).
    """
    cost = cost or Cost()
    stages, microbatches = schedule.placement.stages, schedule.microbatches
    table = cost.table(stages)
    home = schedule.placement.table[0]
    forward_lag = [_lag(home, stage - 1, stage, cost) for stage in range(stages)]
    backward_lag = [_lag(home, stage, stage + 1, cost) for stage in range(stages)]
    size = (stages + 2) * microbatches  # two tables of ends, laid out as in validate
    finished: list[Time | None] = [None] * (2 * size)
    finished[:microbatches] = finished[-microbatches:] = [0] * microbatches
    starts: tuple[list[Time], ...] = tuple([] for _ in schedule.ops)
    ends: tuple[list[Time], ...] = tuple([] for _ in schedule.ops)
    waiting: dict[int, int] = {}
    ready = list(range(len(schedule.ops)))
    while ready:
        rank = ready.pop()
        my_starts, my_ends = starts[rank], ends[rank]
        now = my_ends[-1] if my_ends else 0
        ops = schedule.ops[rank]
        for index in range(len(my_ends), len(ops)):
            code = ops[index]
            kind = code & KIND_MASK
            stage = code >> STAGE_SHIFT & STAGE_MASK
            mine = (stage + 1) * microbatches + (code >> MICROBATCH_SHIFT)
            if kind != 3:
                if kind == 0:
                    need, lag = mine - microbatches, forward_lag[stage]
                else:
                    mine += size
                    need, lag = mine + microbatches, backward_lag[stage]
                arrived = finished[need]
                if arrived is None:
                    waiting[need] = rank
                    break
                if arrived + lag > now:
                    now = arrived + lag
            my_starts.append(now)
            now = now + table[kind][stage]
            my_ends.append(now)
            if kind != 3:
                finished[mine] = now
                if mine in waiting:
                    ready.append(waiting.pop(mine))
    if waiting:
        raise ScheduleError(f"schedule {schedule.name}: it deadlocks, so it has no timeline")
    return Timeline(schedule, starts, ends)


def _lag(home: tuple[int, ...], stage: int, after: int, cost: Cost) -> Time:
    """Latency from one stage to the next; none within a rank and at the ends of the model."""
    inside = stage >= 0 and after < len(home)
    return cost.latency if inside and home[stage] != home[after] else 0


def _ratio(part: Time, whole: Time) -> Time:
    """part / whole, exact for whole numbers and fractions."""
    if isinstance(part, float) or isinstance(whole, float):
        return float(part / whole)
    return Fraction(part) / Fraction(whole)
