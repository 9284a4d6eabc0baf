"""Times of a stream by window."""

from math import lcm
from typing import NamedTuple

from megapipe.schedule.cost import Cost, Time, ratio
from megapipe.schedule.ir import Kind
from megapipe.schedule.streams.stream import AsyncSchedule, finite
from megapipe.schedule.timing.simulate import simulate

STEADY = 4
"""Windows, at least, over which the time of one is measured, behind those in which it fills."""


class WindowTimes(NamedTuple):
    """n windows take n * window + pause."""

    window: Time
    """A window in the steady state."""
    fill: Time
    """From the first start of all until every rank works."""
    pause: Time
    """To run dry, as for a validation, and to fill again."""


def window_times(stream: AsyncSchedule, cost: Cost | None = None) -> WindowTimes:
    """Times of a stream, simulated until it is steady; default costs as for
    :func:`~megapipe.schedule.timing.simulate.simulate`."""
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
    """Windows to measure. Where messages take time, as many micro-batches as there are ranks go
    around together, and a window may end anywhere among them: so these are whole turns."""
    turn = lcm(stream.placement.ranks, stream.microbatches) // stream.microbatches
    return -(-STEADY // turn) * turn
