"""What the callbacks of every run do: what they ask for, tell and write."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from megapipe.data.build import HeldOutBatches
from megapipe.errors import StorageError
from megapipe.observe import sample_log
from megapipe.observe.record import ValidationRecord
from megapipe.observe.summary import read_summary
from megapipe.train.callbacks import Callback, Run, schedule_auto, timelines
from megapipe.train.callbacks.profiling import Profiling
from megapipe.train.callbacks.reports import Reports
from megapipe.train.callbacks.sample_log import SampleLog
from megapipe.train.callbacks.schedule_auto import ScheduleAuto
from megapipe.train.callbacks.timelines import Timelines
from megapipe.train.callbacks.validation import Validation
from megapipe.train.step.evaluation import ValidationResult
from tests.unit.train.stub_run import STEPS, asked, keeps, reported, result, standing_run, turn


def test_a_step_is_reported_with_its_speed_and_the_time_that_is_left(tmp_path: Path) -> None:
    run = standing_run(tmp_path, settings={"plan": {"peak_tflops": 1e-6}})
    reports = Reports(skipped=0, entropy=3.0)
    reports.begin(run)
    reports.after_step(run, turn(5, results=[]))
    reports.after_step(run, turn(6, results=[result(5), result(6, seconds=2.0, memory_gib=1.5)]))
    first, second = reported(run).steps
    assert (first.step, first.steps, first.samples, first.tokens) == (5, STEPS, 40, 8 * 16)
    assert (first.loss, first.lr, first.grad_norm, first.seconds) == (2.0, 0.5, 1.0, 4.0)
    assert first.tokens_per_second == 8 * 16 / 4.0
    tflops = 8 * 16 * run.layout.model.token_flops() / 4.0 / 2 / 1e12
    assert first.tflops_per_device == pytest.approx(tflops)
    assert first.mfu == pytest.approx(tflops / 1e-6)
    assert (first.memory_gib, second.memory_gib) == (None, 1.5)
    assert first.eta_seconds == 4.0 * 5
    assert second.eta_seconds == pytest.approx((0.9 * 4.0 + 0.1 * 2.0) * 4)
    assert (first.loss_scale, first.skipped_steps) == (None, None)
    assert reported(run).notes == []


def test_the_peak_of_an_unknown_device_is_not_guessed(tmp_path: Path) -> None:
    run = standing_run(tmp_path)
    Reports(skipped=0, entropy=3.0).after_step(run, turn(5, results=[result(5)]))
    assert reported(run).steps[0].mfu is None


def test_steps_without_an_update_are_counted_and_told(tmp_path: Path) -> None:
    run = standing_run(tmp_path, scaler=SimpleNamespace(scales=True))
    wrong = result(6, grad_norm=math.inf, loss_scale=1024.0, skipped="why")
    results = [result(5, loss_scale=512.0), wrong, replace(wrong, step=6)]
    Reports(skipped=2, entropy=3.0).after_step(run, turn(7, results=results))
    assert [record.skipped_steps for record in reported(run).steps] == [2, 3, 4]
    assert [record.loss_scale for record in reported(run).steps] == [512.0, 1024.0, 1024.0]
    assert reported(run).notes == ["step 6 is skipped: why", "step 7 is skipped: why"]


def test_the_summary_has_the_first_and_the_last_loss(tmp_path: Path) -> None:
    for rank in (1, 0):
        run = standing_run(tmp_path, rank=rank)
        reports = Reports(skipped=0, entropy=3.0)
        reports.begin(run)
        reports.end(run)
        assert not list(tmp_path.iterdir()), "nothing was trained"
        for number, loss in ((5, 4.0), (6, 3.0), (7, 2.5)):
            reports.after_step(run, turn(number, results=[result(number, loss=loss)]))
        record = ValidationRecord(7, STEPS, 2.75, 1.0)
        reports.after_validation(run, record)
        reports.end(run)
        reports.close(run)
        assert (tmp_path / "summary.json").exists() == (rank == 0)
    assert reported(run).validations == [record]
    assert reported(run).closed
    summary = read_summary(tmp_path)
    assert (summary.loss_first, summary.loss_last, summary.validation_loss) == (4.0, 2.5, 2.75)
    assert (summary.steps, summary.unigram_entropy, summary.run_folder) == (3, 3.0, str(tmp_path))
    assert summary.tokens_per_second == pytest.approx(3 * 8 * 16 / summary.seconds)


def test_a_summary_that_cannot_be_written_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk all else is saved, and the run is done."""
    run = standing_run(tmp_path)
    reports = Reports(skipped=0, entropy=None)
    reports.begin(run)
    reports.after_step(run, turn(5, results=[result(5)]))
    monkeypatch.setattr(
        "megapipe.train.callbacks.reports.write_no_symlinks",
        lambda folder, name, text: Path("/dev/full").write_text(text),
    )
    reports.end(run)
    assert reported(run).notes == [
        f"{tmp_path / 'summary.json'} cannot be written: No space left on device"
    ]


def test_a_run_that_is_not_validated_has_no_validation_loss(tmp_path: Path) -> None:
    run = standing_run(tmp_path)
    reports = Reports(skipped=0, entropy=3.0)
    reports.begin(run)
    reports.after_step(run, turn(5, results=[result(5)]))
    reports.end(run)
    assert json.loads((tmp_path / "summary.json").read_text())["validation_loss"] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_timelines_are_drawn_of_the_steps_that_are_named(rank: int, tmp_path: Path) -> None:
    records, write = mock.Mock(return_value=["record"]), mock.Mock(return_value="drawn")
    settings = {"log": {"timeline": [2, 9]}}
    run = standing_run(tmp_path, rank=rank, settings=settings, schedule="schedule", records=records)
    assert asked(Timelines(), run, "record") == [2, 9]
    assert keeps(Timelines(), run, "record")
    with (
        mock.patch.object(timelines, "timeline", lambda *given: given),
        mock.patch.object(timelines, "write_timeline", write),
    ):
        for number in (1, 2):
            Timelines().after_step(run, turn(number, record=True))
    assert records.call_count == 1, "every rank hands in what it has recorded"
    if rank == 0:
        write.assert_called_once_with(tmp_path, 2, ("schedule", ["record"]), run.layout.cost)
        assert reported(run).notes == ["drawn"]
    else:
        write.assert_not_called()


def test_without_a_flush_steps_beside_the_named_one_are_recorded_too(tmp_path: Path) -> None:
    recorded = mock.Mock(side_effect=["window", "last window", None])
    streaming = SimpleNamespace(recording=SimpleNamespace(after=2), recorded=recorded)
    settings = {"log": {"timeline": [3, 6, 9]}}
    given = {"settings": settings, "streaming": streaming, "records": lambda: ["record"]}
    run = standing_run(tmp_path, **given)  # from step 5 on
    write = mock.Mock(return_value="drawn")
    steps = [turn(number) for number in range(5, STEPS + 1)]
    with mock.patch.object(timelines, "write_window", write):
        for step in steps:
            Timelines().before_step(run, step)
            Timelines().after_step(run, step)
    assert [step.number for step in steps if step.record] == [5, 6, 7, 8, 9, 10]
    plan = run.layout.cost
    assert write.call_args_list == [
        mock.call(tmp_path, 6, "window", plan),
        mock.call(tmp_path, 9, "last window", plan),
    ]
    assert recorded.call_args_list == [mock.call(5, ["record"]), mock.call(8, ["record"])]
    Timelines().after_step(run, turn(8))
    assert reported(run).notes[-1] == ("no timeline of step 6: the pipeline was flushed after it")


def test_a_timeline_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    run = standing_run(tmp_path, settings={"log": {"timeline": [2]}}, schedule=None, records=list)
    with (
        mock.patch.object(timelines, "timeline"),
        mock.patch.object(timelines, "write_timeline", side_effect=OSError("disk is full")),
    ):
        Timelines().after_step(run, turn(2))
    assert reported(run).notes == ["no timeline of step 2: disk is full"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_profile_is_made_of_the_steps_that_are_named(broken: bool, tmp_path: Path) -> None:
    run = standing_run(tmp_path, rank=0, settings={"log": {"profile": [2]}})
    if broken:
        (tmp_path / "profile").write_text("in the way")
    profiling = Profiling()
    for number in (1, 2, 3):
        step = turn(number)
        profiling.before_step(run, step)
        assert step == turn(number, profile=number == 2)
        profiling.after_step(run, step)
    mesh: Any = run.mesh
    assert mesh.barriers == 1, "ranks begin together"
    (note,) = reported(run).notes
    folder = tmp_path / "profile/step_000002"
    if broken:
        assert note.startswith("no complete profile of step 2: rank 0: ")
    else:
        assert note.startswith(f"profile of step 2: a trace per rank in {folder};")
        assert [path.name for path in folder.iterdir()] == ["rank_0000.json.gz"]


def test_the_search_for_a_schedule_is_told_of_steps_and_records_them(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Auto:
        recording = False

        def __init__(self, *given: Any, resumed: bool) -> None:
            seen.append((given, resumed))

        def after(self, seconds: float, *, recorded: bool) -> None:
            seen.append((seconds, recorded))

    run = standing_run(tmp_path)
    callback = ScheduleAuto(resumed=True)
    with mock.patch.object(schedule_auto, "AutoSchedule", Auto):
        callback.begin(run)
    given = (run.config, run.layout, run.train_step, run.mesh, tmp_path, run.note)
    assert seen.pop() == (given, True)
    assert asked(callback, run, "record") == []
    assert keeps(callback, run, "record")
    callback._auto.recording = True  # type: ignore[misc]
    assert asked(callback, run, "record") == list(range(1, STEPS + 1))
    for recorded in (True, False):
        callback.after_step(run, turn(5, results=[result(5)], record=recorded))
    assert seen == [(4.0, True), (4.0, False)]


class Heard(Callback):
    """A callback that records validations, and the steps of checkpoints before their saves."""

    def __init__(self) -> None:
        self.validations: list[ValidationRecord] = []
        self.saves: list[int] = []

    def after_validation(self, run: Run, record: ValidationRecord) -> None:
        self.validations.append(record)

    def before_save(self, run: Run, step: int) -> None:
        self.saves.append(step)


class Held:
    """20 held-out samples."""

    rows = "rows"

    def __len__(self) -> int:
        return 20


def validating(
    folder: Path, found: ValidationResult, *, most: int | None = None
) -> tuple[Run, Validation, list[Any]]:
    calls: list[Any] = []

    def evaluate(rows: Any, samples: int, *, stop: Any) -> ValidationResult:
        calls.append((rows, sample_log, stop()))
        return found

    settings = {"train": {"validate_every": 4, "validation_samples": most}}
    run = standing_run(folder, Heard(), settings=settings, evaluate=evaluate)
    held: Any = Held()
    return run, Validation([HeldOutBatches("", "validation", held)]), calls


def heard(run: Run) -> Heard:
    callbacks: Any = run.callbacks
    (callback,) = callbacks._user
    assert isinstance(callback, Heard)
    return callback


@pytest.mark.parametrize(("most", "samples"), [(None, 20), (12, 12), (30, 20)])
def test_a_run_is_validated_when_due_on_no_more_samples_than_asked(
    most: int | None, samples: int, tmp_path: Path
) -> None:
    run, validation, calls = validating(tmp_path, ValidationResult(2.5, 100), most=most)
    assert asked(validation, run, "validate") == [4, 8, STEPS]
    assert keeps(validation, run, "validate")
    validation.after_step(run, turn(3))
    validation.after_step(run, turn(4, validate=True, stop=True))
    assert calls == []
    step = turn(4, validate=True)
    validation.after_step(run, step)
    assert calls == [("rows", sample_log, False)]
    (record,) = heard(run).validations
    assert (record.step, record.steps, record.loss) == (4, STEPS, 2.5)
    assert 0 <= record.seconds < 5
    assert not step.stop


def test_a_validation_that_is_stopped_stops_the_run(tmp_path: Path) -> None:
    run, validation, _ = validating(tmp_path, ValidationResult(math.nan, 0, stopped=True))
    step = turn(4, validate=True)
    validation.after_step(run, step)
    assert step.stop
    assert not heard(run).validations


@pytest.mark.parametrize("taken", [-1, 10])
def test_samples_that_cannot_be_written_are_one_line(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, or takes but the first bytes of a line."""

    class File:
        def write(self, data: bytes) -> int:
            if taken < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return taken

    batches = SimpleNamespace(origin=lambda number: ("", number, number))
    log = SampleLog(cast(Any, batches))
    run = standing_run(tmp_path, samples_read=[1, 2])
    log.begin(run)
    log.after_step(run, turn(5))
    assert sample_log.read_samples(tmp_path).steps[5][0].number == 1
    monkeypatch.setattr(log._writer, "_file", File())
    words = f"log.sample_ids: cannot write to {tmp_path}: No space left on device"
    with pytest.raises(StorageError, match=words):
        log.after_step(run, turn(6))
