"""Windows in the middle of a stream: what is in them, and when they run."""

from __future__ import annotations

import pytest

from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule
from megapipe.schedule.async_schedules.excerpt import excerpt
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.async_schedules.times import window_times
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import Kind
from megapipe.schedule.memory import curve

STREAMS = [
    ("1f1b", "stash", 4, 1),
    ("1f1b", "double_buffer", 3, 4),
    ("eager_1f1b", "vertical", 3, 2),
    ("two_group", "double_group", 3, 3),
]
COST = Cost(F=3, I=2, W=2, update=1)


@pytest.fixture(params=STREAMS, ids=lambda each: f"{each[1]}, p {each[2]} m {each[3]}")
def stream(request: pytest.FixtureRequest) -> AsyncSchedule:
    order, weights, ranks, microbatches = request.param
    return load_async_schedule(order, weights, ranks=ranks, microbatches=microbatches)


def test_three_windows_of_a_long_run_have_all_that_is_in_flight_before_them(
    stream: AsyncSchedule,
) -> None:
    cut = excerpt(stream, 1000, 499, 501)
    assert cut.whole.microbatches < 20 * stream.microbatches
    for rank, segment in enumerate(stream.segment):
        alive, listed = cut.in_flight[rank], cut.schedule.rank_ops(rank)
        assert alive == len(stream.fill[rank])
        assert all(op.kind == Kind.F for op in listed[:alive])
        kinds = [(op.kind, op.stage) for op in segment]
        assert [(op.kind, op.stage) for op in listed[alive:]] == 3 * kinds
        backwards = {(op.stage, op.microbatch) for op in listed if op.kind == Kind.B}
        assert all((op.stage, op.microbatch) in backwards for op in listed[:alive])


def test_a_window_lasts_as_long_as_one_of_the_steady_state(stream: AsyncSchedule) -> None:
    cut = excerpt(stream, 1000, 499, 500 + max(1, stream.ahead))
    timeline = cut.simulated(COST)
    begin, end = cut.span(timeline, 1)
    times = window_times(stream, COST)
    assert end - begin == times.window
    stages = len(stream.placement.stages_of(0))
    work = stages * (stream.microbatches * 7 + 1)
    assert timeline.idle_between(begin, end) == pytest.approx(1 - work / times.window)
    for rank in range(stream.placement.ranks):
        held = [float(amount) for _, amount in curve(timeline, rank)]
        assert min(held) >= 0


def test_at_the_ends_of_a_run_windows_are_those_that_there_are(stream: AsyncSchedule) -> None:
    windows = 9
    first, last = excerpt(stream, windows, 0, 1), excerpt(stream, windows, 7, 8)
    for cut in (first, last):
        timeline = cut.simulated(COST)
        begins = [cut.span(timeline, number)[0] for number in range(2)]
        assert begins[0] < begins[1] < cut.span(timeline, 1)[1]
    assert first.whole == excerpt(stream, windows, 0, 0).whole or stream.ahead > 0
    forwards = [op for op in last.schedule.rank_ops(0) if op.kind == Kind.F]
    assert len(forwards) == 2 * stream.microbatches * len(stream.placement.stages_of(0))
