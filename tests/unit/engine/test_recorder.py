"""What is measured becomes the timeline and the costs that it was."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from megapipe.engine import recorder
from megapipe.engine.executor import run_together
from megapipe.engine.recorder import (
    Event,
    Record,
    Recorder,
    measured_cost,
    stream_timeline,
    timeline,
)
from megapipe.errors import ScheduleError
from megapipe.schedule.async_schedules.excerpt import Excerpt, excerpt
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build, forward_only, names
from megapipe.schedule.ir import Kind, Op, Schedule, pack, packed
from megapipe.schedule.placement import loop
from megapipe.schedule.timing.idle import idle
from megapipe.schedule.timing.simulate import Timeline, simulate
from tests.unit.engine.fake_stages import fake_executors, microbatches_of

CPU = torch.device("cpu")
UNEVEN = Cost(F=(1, 2, 4, 1), I=(2, 2, 3, 5), W=(1, 3, 1, 2))


def records_of(predicted: Timeline) -> list[Record]:
    """Return the records of a simulated step in which every rank began at another time."""
    schedule = predicted.schedule
    table = predicted.cost.table(schedule.placement.stages)
    records = []
    for rank, (starts, ends) in enumerate(zip(predicted.starts, predicted.ends, strict=True)):
        began = 1024.0 + rank
        ops = schedule.rank_ops(rank)
        events = []
        for index, (op, start, end) in enumerate(zip(ops, starts, ends, strict=True)):
            alone = table[op.kind][op.stage] * schedule.size_of(op.microbatch)
            if op.joined:
                end = start + alone
            elif index and ops[index - 1].joined:
                start = end - alone
            event = Event(op._replace(joined=False), 2048 + start - began, 2048 + end - began)
            events.append(event)
        records.append(Record("here", began, events))
    return records


def schedules() -> list[Schedule]:
    """Build each registered schedule on four ranks."""
    result = []
    for name in names():
        try:
            result.append(build(name, ranks=4, microbatches=8))
        except ScheduleError:
            continue
    return result


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the readings of the recorders' clock, which shows the last one."""
    now = [0.0]
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: now[-1]))
    return now


def test_times_count_from_the_beginning_of_the_step(clock: list[float]) -> None:
    watch = Recorder(CPU)
    calls = [
        (watch.timed(Op(Kind.F, 2, 5, 1), lambda: clock.append(clock[-1] + 2.0)), 1.0),
        (watch.timed(Op(Kind.W, 0, 4), lambda: clock.append(clock[-1] + 0.5)), 3.5),
    ]
    for began in (8.0, 64.0):
        clock.append(began)
        watch.begin()
        for call, start in calls:
            clock.append(began + start)
            call()
        wanted = [
            Event(Op(Kind.F, 2, 5, 1), 1.0, 3.0),
            Event(Op(Kind.W, 0, 4), 3.5, 4.0),
        ]
        assert watch.events() == wanted, "what was recorded before begin is forgotten"
        record = watch.record()
        assert (record.began, record.events) == (began, wanted)


@pytest.mark.parametrize("name", ["zb_h1", "dualpipe"])
def test_the_measured_timeline_is_the_one_that_ran(name: str) -> None:
    """The latter has pairs of operations that run as one."""
    predicted = simulate(build(name, ranks=4, microbatches=8), UNEVEN)
    measured = timeline(predicted.schedule, records_of(predicted))
    assert [list(starts) for starts in measured.starts] == [list(s) for s in predicted.starts]
    assert [list(ends) for ends in measured.ends] == [list(ends) for ends in predicted.ends]
    assert measured.cost == Cost(F=UNEVEN.F, I=UNEVEN.I, W=UNEVEN.W, B=(3, 5, 4, 7), R=UNEVEN.F)
    assert (measured.spans, measured.busy) == (predicted.spans, predicted.busy)
    assert idle(measured) == idle(predicted)


def test_an_executor_records_every_operation_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks share a recorder here, and its clock goes on by one whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    schedule = build("zb_v", ranks=2, microbatches=3)
    watch = Recorder(CPU)
    executors, _ = fake_executors(schedule, train=True, recorder=watch)
    for _ in range(2):
        run_together(executors, microbatches_of(schedule))
    host, began, events = watch.record()
    by_rank = [
        [event for event in events if schedule.placement.rank_of(event.op.stage) == rank]
        for rank in range(2)
    ]
    measured = timeline(schedule, [Record(host, began, mine) for mine in by_rank])
    assert measured.cost == Cost(
        F=(1.0,) * 4, I=(1.0,) * 4, W=(1.0,) * 4, B=(2.0,) * 4, R=(1.0,) * 4
    )
    assert measured.makespan == 2 * len(events) - 1


def test_ranks_of_another_host_are_aligned_by_the_earliest() -> None:
    schedule = build("gpipe", ranks=3, microbatches=1)
    ops = [schedule.rank_ops(rank) for rank in range(3)]
    times = [[(1.0, 2.0), (5.0, 6.0)], [(2.0, 3.0), (4.0, 5.0)], [(0.0, 0.5), (0.5, 1.0)]]
    events = [
        [Event(op, *pair) for op, pair in zip(*both, strict=True)]
        for both in zip(ops, times, strict=True)
    ]
    records = [
        Record("a", 100.0, events[0]),
        Record("b", 7000.0, events[1]),
        Record("b", 7003.0, events[2]),
    ]
    measured = timeline(schedule, records)
    assert measured.starts == ([0.0, 4.0], [1.0, 3.0], [2.0, 2.5])
    assert measured.ends == ([1.0, 5.0], [2.0, 4.0], [2.5, 3.0])
    assert measured.makespan == 5.0


def windows() -> tuple[Excerpt, list[Record]]:
    """Return three windows of a no-flush schedule and what recorders would have seen of them:
    micro-batches count from the window in which an operation ran."""
    stream = load_async_schedule("1f1b", "double_buffer", ranks=3, microbatches=4)
    cut = excerpt(stream, 1000, 499, 501)
    predicted = cut.simulated(Cost(F=3, I=2, W=2, update=1))
    records = []
    for rank, alive in enumerate(cut.in_flight):
        each = zip(
            cut.schedule.rank_ops(rank), predicted.starts[rank], predicted.ends[rank], strict=True
        )
        events = [
            Event(op._replace(microbatch=op.microbatch % 4), float(start), float(end))
            for op, start, end in list(each)[alive:]
        ]
        records.append(Record("here", 0.0, events))
    return cut, records


def test_windows_of_a_stream_that_ran() -> None:
    """They have the forwards that were in flight at the beginning."""
    cut, records = windows()
    predicted = cut.simulated(Cost(F=3, I=2, W=2, update=1))
    measured = stream_timeline(cut, records, [0, 0, 0])
    first = min(float(starts[0]) for starts in predicted.starts)
    for rank, alive in enumerate(cut.in_flight):
        starts = [float(start) - first for start in predicted.starts[rank]]
        assert list(measured.starts[rank])[alive:] == starts[alive:]


@pytest.mark.parametrize("change", [{"microbatch": 3}, {"stage": 2}], ids=str)
def test_another_order_in_a_stream_is_named(change: dict[str, int]) -> None:
    cut, records = windows()
    event = records[0].events[5]
    assert all(getattr(event.op, name) != value for name, value in change.items())
    records[0].events[5] = event._replace(op=event.op._replace(**change))
    with pytest.raises(ScheduleError, match=r"rank 0: op .* of its list is .* ran"):
        stream_timeline(cut, records, [0, 0, 0])


def test_another_order_or_a_missing_operation_is_named() -> None:
    predicted = simulate(build("1f1b", ranks=2, microbatches=3))
    records = records_of(predicted)
    events = records[1].events
    swapped = [*events[:2], events[3], events[2], *events[4:]]
    with pytest.raises(
        ScheduleError, match=r"^schedule 1f1b: rank 1: op 2 of its list is 1F1, but 1B1 ran$"
    ):
        timeline(predicted.schedule, [records[0], records[1]._replace(events=swapped)])
    with pytest.raises(
        ScheduleError, match=r"^schedule 1f1b: rank 1: 5 operations ran, its list has 6$"
    ):
        timeline(predicted.schedule, [records[0], records[1]._replace(events=events[:-1])])


@pytest.mark.parametrize("schedule", schedules(), ids=lambda schedule: schedule.name)
def test_a_simulation_at_measured_costs_is_the_measured_timeline(schedule: Schedule) -> None:
    stages = schedule.placement.stages
    cost = Cost(
        F=tuple(4 + 4 * (stage % 3) for stage in range(stages)),
        I=tuple(8 + 4 * (stage % 2) for stage in range(stages)),
        W=tuple(4 + 4 * (stage % 5) for stage in range(stages)),
        slices=(Fraction(1, 4), Fraction(3, 4)) if schedule.slices == 2 else None,
    )
    predicted = simulate(schedule, cost)
    measured = timeline(schedule, records_of(predicted))
    assert measured.makespan == predicted.makespan
    again = simulate(schedule, measured.cost)
    assert [list(ends) for ends in again.ends] == [list(ends) for ends in measured.ends]


def test_costs_are_medians_over_micro_batches_and_steps() -> None:
    schedule = build("gpipe", ranks=1, microbatches=3)
    steps = []
    for forwards in ((1.0, 2.0, 90.0), (3.0, 0.5, 2.5)):
        events = [Event(Op(Kind.F, 0, m), 100.0 * m, 100.0 * m + t) for m, t in enumerate(forwards)]
        events += [Event(Op(Kind.B, 0, m), 1000.0 + m, 1000.5 + m) for m in range(3)]
        steps.append(Record("here", 0.0, events))
    assert measured_cost(schedule, steps) == Cost(
        F=(2.25,), I=(0.5,), W=(0.0,), B=(0.5,), R=(2.25,)
    )


def test_an_operation_on_half_a_micro_batch_counts_double() -> None:
    half = Fraction(1, 2)
    ops = [pack(kind, 0, m) for kind in (Kind.F, Kind.I, Kind.W) for m in range(3)]
    schedule = Schedule("s", loop(1), 3, (packed(ops),), sizes=(half, half, Fraction(1)))
    seconds = {Kind.F: 3.0, Kind.I: 5.0, Kind.W: 1.0}
    events = [
        Event(op, 0.0, seconds[op.kind] * float(schedule.size_of(op.microbatch)))
        for op in schedule.rank_ops(0)
    ]
    cost = measured_cost(schedule, [Record("here", 0.0, events)])
    assert cost == Cost(F=(3.0,), I=(5.0,), W=(1.0,), B=(6.0,), R=(3.0,))


def test_what_a_backward_recomputed_is_taken_off() -> None:
    ops = [Op(Kind.F, 0, 0), Op(Kind.I, 0, 0), Op(Kind.W, 0, 0)]
    ops += [Op(Kind.F, 0, 1), Op(Kind.R, 0, 1), Op(Kind.I, 0, 1), Op(Kind.W, 0, 1)]
    schedule = Schedule(
        "s", loop(1), 2, (packed(pack(*op) for op in ops),), recompute=frozenset({0})
    )
    times = [2.0, 3.0 + 4.0, 1.0, 2.0, 3.0, 4.0, 1.0]
    for dropped in (set(), {5}):
        events = [
            Event(op, 0.0, time)
            for index, (op, time) in enumerate(zip(ops, times, strict=True))
            if index not in dropped
        ]
        cost = measured_cost(schedule, [Record("here", 0.0, events)])
        assert cost == Cost(F=(2.0,), I=(4.0,), W=(1.0,), B=(5.0,), R=(3.0,))


def test_a_stage_without_records_is_named() -> None:
    predicted = simulate(build("1f1b", ranks=2, microbatches=2))
    with pytest.raises(
        ScheduleError,
        match=r"^schedule 1f1b: no forward of stage 1 was recorded: pass the records of all ranks$",
    ):
        measured_cost(predicted.schedule, records_of(predicted)[:1])


def test_a_validation_program_has_forwards_alone() -> None:
    predicted = simulate(forward_only(loop(4), 3), UNEVEN)
    cost = timeline(predicted.schedule, records_of(predicted)).cost
    assert (cost.F, cost.I, cost.W) == (UNEVEN.F, (0.0,) * 4, (0.0,) * 4)


def test_a_record_is_the_same_after_its_way_as_text() -> None:
    event = Event(Op(Kind.W, 3, 7, 1, joined=True), 0.1, 1 / 3)
    record = Record("a host", 1024.000001, [event, event._replace(op=Op(Kind.F, 0, 0))])
    again = Record.of(json.loads(json.dumps(record)))
    assert again == record
    assert isinstance(again.events[0].op.kind, Kind)
