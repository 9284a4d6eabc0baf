"""Messages of a pipeline rank that never flushes: when they are expected, posted and received."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from megapipe.engine.async_runner import AsyncRunner
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.async_schedules.programs import ProgramSegment, Runs
from megapipe.schedule.ir import Kind, Op
from megapipe.watch.journal import Journal
from tests.unit.engine.fake_stages import FakeChannels, FakeStage, scalar

STREAM = load_async_schedule("1f1b", "stash", ranks=2, microbatches=2, extra_warmup=0)
WINDOWS = 12


class FakeWeights:
    """Nothing depends on them here."""

    def point_at(self, stage: int, read: Any) -> None:
        pass

    def update(self, stage: int, windows_before: int) -> None:
        pass


def flow_of(rank: int, log: list[str], receive_ahead: int | None) -> AsyncRunner:
    stages: Any = {
        stage: FakeStage(stage, STREAM.placement.stages, log)
        for stage in STREAM.placement.stages_of(rank)
    }
    channels: Any = FakeChannels(log, 1 - rank)
    weights: Any = FakeWeights()
    return AsyncRunner(
        stages,
        channels,
        weights,
        counted={},
        window=STREAM.microbatches,
        shape=scalar,
        agree=False,
        recorder=None,  # type: ignore[arg-type]
        name=lambda action, call: call,
        receive_ahead=receive_ahead,
        journal=Journal(),
    )


class Playing:
    """A rank that runs windows of a stream, and what it did."""

    def __init__(self, rank: int, receive_ahead: int | None = None) -> None:
        self.rank, self.log = rank, list[str]()
        self.flow = flow_of(rank, self.log, receive_ahead)
        self.runs = Runs(STREAM)
        self.window = -1

    def begin(self) -> None:
        self.flow.begin()
        self._run(self.runs.of(WINDOWS).fill[self.rank])
        self.window = 0

    def next(self) -> None:
        """Run the next window to its end."""
        part = self.runs.part(self.window, WINDOWS)[self.rank]
        self._run(part)
        self.under_way = part.in_flight
        self.flow.cut()
        self.window += 1

    def steady(self) -> None:
        """Begin and run six windows, until one is like the one before."""
        self.begin()
        for _ in range(6):
            self.next()

    def _run(self, part: ProgramSegment) -> None:
        self.log.clear()
        segment = self.flow.segment(part, record=False, name=False)
        segment.enter({(number, 0): cast(Any, float(number)) for number in range(-9, 9)})
        segment.run_all()


OF_FIRST = (
    "from 1 expect 1I0 [], 1I1 []",
    *("from 1 posted", "0F1=1", "to 1 0F1=2", "from 1", "1 has received 1"),
    *("from 1 posted", "0I0=0", "0W0", "0F2=2", "to 1 0F0=3"),
    *("from 1", "1 has received 1", "0I1=0", "0W1"),
)
OF_LAST = (
    *("from 0 expect 0F1 []", "from 0 expect 0F0 []", "from 0", "0 has received 1"),
    *("from 0 posted", "1F0=0", "1I0=0", "1W0", "to 0 1I0=1", "from 0", "0 has received 1"),
    *("from 0 posted", "1F1=0", "1I1=100", "1W1", "to 0 1I1=101"),
)
"""The second receive that it posts is of the next window's first message, which is expected with
those of this one."""


@pytest.mark.parametrize(("rank", "expected"), [(0, OF_FIRST), (1, OF_LAST)])
def test_receives_are_posted_as_early_as_can_be(rank: int, expected: tuple[str, ...]) -> None:
    """They are posted so from the second run of a part on."""
    playing = Playing(rank)
    playing.steady()
    assert playing.log == [*expected]


@pytest.mark.parametrize(("rank", "expected"), [(0, OF_FIRST), (1, OF_LAST)])
def test_receives_are_posted_an_operation_before_they_are_needed(
    rank: int, expected: tuple[str, ...]
) -> None:
    """They are if that is asked for, and none is posted behind the end."""
    playing = Playing(rank, receive_ahead=1)
    playing.steady()
    kept = [line for line in expected if "posted" not in line]
    before = ("0F1=1", "0F2=2") if rank == 0 else ("1I0=0",)
    for line in before:
        kept.insert(kept.index(line), f"from {1 - rank} posted")
    assert playing.log == kept


def test_what_a_pause_has_received_is_not_received_again() -> None:
    """Nor is a receive posted ahead in the window behind it; the one after is as ever."""
    playing = Playing(1)
    playing.steady()
    playing.log.clear()
    playing.flow.pause(playing.under_way)
    assert playing.log == ["from 0", "to 0 set aside"]
    assert len(playing.flow.inbox) == 1
    playing.flow.resume()
    assert playing.log[-1] == "to 0 taken back 1"
    playing.next()
    without = [line for line in OF_LAST if "posted" not in line]
    without.remove("from 0")
    assert playing.log == without
    playing.next()
    assert playing.log == [*OF_LAST]


def test_what_waits_is_counted_from_the_next_window_at_a_cut() -> None:
    """It may wait for more than one."""
    flow = Playing(1).flow
    waiting = torch.tensor(7.0)
    flow.inbox[Op(Kind.F, 0, 5)] = waiting
    for number in (5, 3, 1):
        assert flow.inbox == {Op(Kind.F, 0, number): waiting}
        flow.cut()


def test_a_beginning_forgets_what_was_in_flight() -> None:
    """A run that goes back to a checkpoint after a pause begins so."""
    playing = Playing(1)
    playing.steady()
    playing.flow.pause(playing.under_way)
    assert playing.flow.inbox
    playing.begin()
    playing.flow.resume()
    assert not playing.flow.inbox
    assert playing.log == ["from 0 expect 0F0 []"], "nothing is taken back"
