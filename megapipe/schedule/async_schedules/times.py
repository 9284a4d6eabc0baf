"""Times of a no-flush schedule, per update window."""

from math import lcm
from typing import NamedTuple

from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, finite
from megapipe.schedule.cost import Cost, Time, ratio
from megapipe.schedule.ir import Kind
from megapipe.schedule.timing.simulate import simulate

STEADY = 4
"""Minimum number of update windows in the steady state over which :func:`window_times` averages."""


class WindowTimes(NamedTuple):
    """Times of a run: n update windows take n * window + pause."""

    window: Time
    """Time of an update window in the steady state."""
    fill: Time
    """Time from the first start of any rank until every rank works."""
    pause: Time
    """Time to drain the pipeline, for example before a validation, and to fill it again."""


def window_times(stream: AsyncSchedule, cost: Cost | None = None) -> WindowTimes:
    """Simulate a no-flush schedule until the steady state and return its times. The default of
    `cost` is :class:`Cost() <megapipe.schedule.cost.Cost>`."""
    begin = stream.ahead + 2
    end = begin + _whole_turns(stream)
    windows = end + stream.ahead + 2
    timeline = simulate(finite(stream, windows), cost)
    ends = {
        op.microbatch // stream.microbatches: end
        for op, end in zip(timeline.schedule.rank_ops(0), timeline.ends[0], strict=True)
        if op.kind == Kind.B and op.stage == 0
    }
    window = ratio(ends[end] - ends[begin], end - begin)
    return WindowTimes(
        window=window,
        fill=max(starts[0] for starts in timeline.starts) - timeline.begin,
        pause=timeline.makespan - windows * window,
    )


def _whole_turns(stream: AsyncSchedule) -> int:
    """Return the number of update windows to measure. If messages take time, micro-batches pass the
    ranks in groups of `ranks`, and a window can end within a group. So the number is chosen such
    that the measured windows are whole groups."""
    turn = lcm(stream.placement.ranks, stream.microbatches) // stream.microbatches
    return -(-STEADY // turn) * turn
