"""Which steps count, what is gathered of them, and what the user is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.distributed.mesh import Grid
from megapipe.schedule.generators.registry import build
from megapipe.train.callbacks import Run, Step
from megapipe.train.callbacks.reports import Reports
from megapipe.train.callbacks.stragglers import SETTLING, StragglerWatch
from megapipe.train.compute_times import ComputeTimes
from megapipe.watch.compute_time import ComputeTime
from tests.unit.train.stub_run import Mesh, reported, result, standing_run

EVERY = 8


def timed(own: ComputeTime, operation: Callable[[], None]) -> None:
    """Run an operation as the engine does."""
    if own.on:
        own.operation(operation)
    else:
        operation()


class Peers(Mesh):
    """A mesh of `grid`, whose other ranks take a factor of this one's time for a step."""

    def __init__(self, grid: Grid, rank: int = 0) -> None:
        super().__init__(rank)
        self.grid, self.world = grid, grid.world
        self.factors = [1.0] * grid.world
        self.kept: dict[str, str] = {f"megapipe/stragglers/{i}": f"process {i}" for i in range(9)}
        self.store = SimpleNamespace(set=self.kept.__setitem__, get=self.get)
        self.gathered: list[list[int]] = []

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()

    def gather_numbers(self, own: torch.Tensor) -> torch.Tensor:
        self.gathered.append(own.tolist())
        seconds, spread, steps = own.tolist()
        return torch.tensor([[int(seconds * f), int(spread * f), steps] for f in self.factors])


class Clock:
    """Operations of this rank take 0.1 s of its time, and as long again in waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def passes(self) -> None:
        self.now += 0.1


class Job:
    """A run that stands still, and its steps."""

    def __init__(self, folder: Path, grid: Grid, *, every: int = EVERY, rank: int = 0) -> None:
        self.mesh = Peers(grid, rank)
        self.watch = StragglerWatch(self.mesh, every)  # type: ignore[arg-type]
        self.reports = Reports(skipped=0, entropy=None, stragglers=self.watch)
        schedule = build("1f1b", ranks=grid.pp, microbatches=4)
        step = {"schedule": schedule, "placement": schedule.placement}
        run = standing_run(folder, rank=rank, world=grid.pp, settings=settings_of(grid), **step)
        self.run: Run = replace(run, mesh=self.mesh)  # type: ignore[arg-type]
        clock = Clock()
        own, line = self.mesh.journal.own_time, self.mesh.journal.counter("peers", [0, 1])
        own.stamp = lambda: clock.now

        def operation() -> None:
            clock.passes()
            line.wait(line.count(), clock.passes)

        self.operation = partial(timed, own, operation)
        self.number = 0
        self.watch.begin(self.run)

    def step(self, **values: Any) -> None:
        self.number += 1
        step = Step(self.number, last=False, **values)
        with self.watch.timed(step):
            self.operation()
        self.operation()  # as in validation: it does not count
        step.results = [result(self.number, seconds=0.4)]
        self.watch.after_step(self.run, step)
        self.reports.after_step(self.run, step)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @property
    def notes(self) -> list[str]:
        return reported(self.run).notes

    @property
    def scored(self) -> dict[int, tuple[int, float]]:
        """Ranks and scores by the steps that have them."""
        found = {}
        for record in reported(self.run).steps:
            assert (record.straggler_rank is None) == (record.straggler_score is None)
            if record.straggler_rank is not None and record.straggler_score is not None:
                found[record.step] = record.straggler_rank, round(record.straggler_score, 3)
        return found


def settings_of(grid: Grid) -> dict[str, dict[str, Any]]:
    return {"model": {"layers": 4}, "parallel": {"pp": grid.pp}} if grid.pp > 1 else {}


def test_a_slow_peer_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, Grid(dp=2, tp=2))
    job.mesh.factors[3] = 2.6
    job.steps(SETTLING + 2 * EVERY)
    assert job.mesh.gathered == [[100_000_000, 0, EVERY]] * 2
    assert job.scored == {SETTLING + EVERY: (3, 2.6), SETTLING + 2 * EVERY: (3, 2.6)}
    (note,) = job.notes
    assert note == (
        "rank 3 (pp 0, dp 1, cp 0, tp 1; process 3) is a straggler since step 6: it computes 2.60 "
        "times as long as its peers, 260 ms of a step of 400 ms and not 100 ms; up to 40% of the "
        "job's time is lost by it"
    )
    job.steps(2 * EVERY)
    assert len(job.notes) == 1
    job.mesh.factors[3] = 5.0
    job.steps(2 * EVERY)
    assert "is still a straggler since step 6: it computes 5.00 times" in job.notes[1]
    assert "up to 100% of" in job.notes[1]
    job.mesh.factors[3] = 1.0
    job.steps(4 * EVERY)
    (note,) = job.notes[2:]
    assert note == (
        "rank 3 (pp 0, dp 1, cp 0, tp 1; process 3) is no longer a straggler: since step 54 "
        "it computes 1.00 times as long as its peers"
    )


def test_metrics_have_the_score(tmp_path: Path) -> None:
    job = Job(tmp_path, Grid(dp=2))
    job.mesh.factors = [3.0, 1.0]
    job.steps(SETTLING + EVERY)
    before, last = reported(job.run).steps[-2:]
    assert last.metrics()["straggler/rank"] == 0
    assert last.metrics()["straggler/score"] == pytest.approx(3.0)
    assert "straggler/score" not in before.metrics()


def test_ranks_of_a_pipeline_are_compared_by_their_work(tmp_path: Path) -> None:
    """The last stage has the head: it has a score below its time's."""
    job = Job(tmp_path, Grid(pp=2))
    job.mesh.factors = [1.0, 4.0]
    job.steps(SETTLING + 2 * EVERY)
    (note,) = job.notes
    assert "rank 1 (pp 1, dp 0, cp 0, tp 0; process 1) is a straggler" in note
    assert "times as long as other ranks would need for its stages, 400 ms of a step" in note


def test_steps_that_are_recorded_or_profiled_do_not_count(tmp_path: Path) -> None:
    job = Job(tmp_path, Grid(dp=2))
    job.steps(SETTLING + 1)
    for _ in range(EVERY):
        job.step(record=True)
        job.step(profile=True)
    assert job.mesh.gathered == []
    job.steps(EVERY - 1)
    assert job.mesh.gathered == [[100_000_000, 0, EVERY]]


def test_a_window_begins_anew_after_a_rewind_and_with_another_schedule(tmp_path: Path) -> None:
    job = Job(tmp_path, Grid(dp=2))
    job.steps(SETTLING + EVERY - 1)
    job.watch.after_rewind(job.run, 3)
    job.steps(SETTLING + EVERY - 1)
    assert job.mesh.gathered == []
    job.step()
    assert len(job.mesh.gathered) == 1
    job.steps(EVERY - 1)
    job.run.train_step.schedule = build("gpipe", ranks=1, microbatches=4)
    job.steps(1 + SETTLING + EVERY - 1)
    assert len(job.mesh.gathered) == 1
    job.step()
    assert len(job.mesh.gathered) == 2


@pytest.mark.parametrize(("grid", "every"), [(Grid(), EVERY), (Grid(dp=2), 0)])
def test_a_rank_alone_and_one_that_is_not_to_be_watched(
    grid: Grid, every: int, tmp_path: Path
) -> None:
    job = Job(tmp_path, grid, every=every)
    job.steps(SETTLING + 3 * EVERY)
    assert job.mesh.gathered == []
    assert job.scored == {}
    assert job.notes == []


def test_other_ranks_take_part_and_tell_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, Grid(dp=2), rank=1)
    job.mesh.factors = [1.0, 3.0]
    job.steps(SETTLING + 2 * EVERY)
    assert len(job.mesh.gathered) == 2
    assert job.watch.slowest is None


class Event:
    """An event of a GPU that has come to those before `reached`."""

    reached = 0
    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.number = Event.recorded

    def query(self) -> bool:
        return self.number <= Event.reached

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        return 1e3 * (end.number - self.number)


def test_on_a_gpu_only_what_it_has_come_to_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    journal = Mesh(0).journal
    own = ComputeTimes(journal.own_time, torch.device("cuda"))
    line = journal.counter("peers", [0, 1])
    waits: Sequence[int] = (1, 2, 3)
    for count in waits:
        with own.step():

            def operation(count: int = count) -> None:
                for _ in range(count):
                    line.wait(line.count(), lambda: None)

            timed(journal.own_time, operation)
    assert own.known() == []
    Event.reached = 4 + 5  # the second step ends with event 10
    assert own.known() == [2.0]
    Event.reached = 100
    assert own.known() == [3.0, 4.0]
    assert own.known() == []
    before = Event.recorded
    with own.step():
        timed(journal.own_time, operation)
    own.drop()
    assert own.known() == []
    assert Event.recorded == before + 8


def test_a_step_that_fails_is_not_timed() -> None:
    journal = Mesh(0).journal
    own = ComputeTimes(journal.own_time, torch.device("cpu"))

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), own.step():
        timed(journal.own_time, fails)
    assert own.known() == []
    timed(journal.own_time, lambda: None)
    with own.step():
        pass
    assert own.known() == [0.0]
