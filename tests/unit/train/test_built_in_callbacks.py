"""What the callbacks of every run do: what they ask for, tell and write."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megapipe.checkpoint import Alone, Checkpoint, Meta, Piece, save, whole
from megapipe.data.build import HeldOutBatches
from megapipe.errors import ConfigError
from megapipe.observe import samples
from megapipe.observe.record import ValidationRecord
from megapipe.observe.summary import read_summary
from megapipe.train.callbacks import Callback, Run, Step, Wishes, schedule_auto, timelines
from megapipe.train.callbacks import saving as callback_saving
from megapipe.train.callbacks.profiling import Profiling
from megapipe.train.callbacks.reports import Reports
from megapipe.train.callbacks.sample_log import SampleLog
from megapipe.train.callbacks.saving import Clock, Saving
from megapipe.train.callbacks.schedule_auto import ScheduleAuto
from megapipe.train.callbacks.timelines import Timelines
from megapipe.train.callbacks.validation import Validation
from megapipe.train.checkpoint_io import Content
from megapipe.train.evaluation import Evaluation
from megapipe.train.run_folder import RunFolder
from tests.unit.train.standing_run import STEPS, reported, result, standing_run


def turn(number: int, **values: Any) -> Step:
    return Step(number, last=number == STEPS, **values)


def asked(callback: Callback, run: Run, wanted: str) -> list[int]:
    """The steps for which it makes this request; it makes no other one."""
    steps = [turn(number) for number in range(1, STEPS + 1)]
    for step in steps:
        callback.before_step(run, step)
        assert step in (turn(step.number), replace(turn(step.number), **{wanted: True}))
    return [step.number for step in steps if getattr(step, wanted)]


def keeps(callback: Callback, run: Run, request: str) -> bool:
    """Whether a request that another has made stays."""
    step = turn(1, **{request: True})
    callback.before_step(run, step)
    return bool(getattr(step, request))


def test_a_step_is_reported_with_its_speed_and_the_time_that_is_left(tmp_path: Path) -> None:
    run = standing_run(tmp_path, settings={"log": {"peak_tflops": 1e-6}})
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
    assert (first.loss_scale, first.skipped) == (None, None)
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
    assert [record.skipped for record in reported(run).steps] == [2, 3, 4]
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
    """As on a disk that is full: all else is saved, and the run is done."""
    run = standing_run(tmp_path)
    reports = Reports(skipped=0, entropy=None)
    reports.begin(run)
    reports.after_step(run, turn(5, results=[result(5)]))
    monkeypatch.setattr(
        "megapipe.train.callbacks.reports.write_beneath",
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
    assert reported(run).notes[-1] == (
        "no timeline of step 6: the pipeline was filled anew behind it"
    )


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
        assert note.startswith("no whole profile of step 2: rank 0: ")
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
    """What is told of validations, and before which steps' checkpoints."""

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
    folder: Path, found: Evaluation, *, most: int | None = None
) -> tuple[Run, Validation, list[Any]]:
    calls: list[Any] = []

    def evaluate(rows: Any, samples: int, *, stop: Any) -> Evaluation:
        calls.append((rows, samples, stop()))
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
    run, validation, calls = validating(tmp_path, Evaluation(2.5, 100), most=most)
    assert asked(validation, run, "validate") == [4, 8, STEPS]
    assert keeps(validation, run, "validate")
    validation.after_step(run, turn(3))
    validation.after_step(run, turn(4, validate=True, stop=True))
    assert calls == []
    step = turn(4, validate=True)
    validation.after_step(run, step)
    assert calls == [("rows", samples, False)]
    (record,) = heard(run).validations
    assert (record.step, record.steps, record.loss) == (4, STEPS, 2.5)
    assert 0 <= record.seconds < 5
    assert not step.stop


def test_a_validation_that_is_stopped_stops_the_run(tmp_path: Path) -> None:
    run, validation, _ = validating(tmp_path, Evaluation(math.nan, 0, stopped=True))
    step = turn(4, validate=True)
    validation.after_step(run, step)
    assert step.stop
    assert not heard(run).validations


def test_checkpoints_are_due_by_steps_by_the_clock_and_at_the_end(tmp_path: Path) -> None:
    settings = {"checkpoint": {"every": 3}}
    corpus: Any = None
    saved: list[tuple[int, bool]] = []
    for rank, decides in ((0, True), (1, False)):
        run = standing_run(tmp_path, rank=rank, settings=settings)
        saving = Saving(RunFolder(tmp_path), Clock(1e-9), run_id="run", corpus=corpus, order="")
        assert asked(saving, run, "save") == [3, 6, 9, STEPS]
        assert keeps(saving, run, "save")
        time.sleep(1e-3)
        assert saving.wishes(run) == Wishes(save=decides), "one clock for all"
    saving.clock = Clock(3600)
    saving.clock._began -= 7200
    assert saving.clock.due
    saving.begin(run)
    assert not saving.clock.due
    with mock.patch.object(saving, "save", lambda run, number, wait: saved.append((number, wait))):
        steps = (turn(1), turn(2, save=True), turn(4, stop=True), turn(5, validate=True))
        for step in (*steps, turn(STEPS, save=True)):
            saving.after_step(run, step)
    assert saved == [(2, False), (4, True), (STEPS, True)]


WHOLE = SimpleNamespace(has_state=True)
"""In the place of a checkpoint that is intact."""


def made(root: Path, *, step: int, **given: Any) -> Path:
    """In the place of a save: an empty folder."""
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    return path


def test_old_checkpoints_go_when_a_finite_step_has_followed_the_newest(tmp_path: Path) -> None:
    """What is damaged does not count as kept, and what cannot be removed is told."""
    folder, corpus = RunFolder(tmp_path), SimpleNamespace(digest="", content="", tokenizer="")

    def verified(path: Path, mesh: Any) -> tuple[Any, str]:
        looked.append(path.name[-1])
        return (None, f"{path} is damaged") if path.name[-1] in damaged else (WHOLE, "")

    def kept() -> str:
        return "".join(sorted(path.name[-1] for path in folder.checkpoints.glob("step-*")))

    run = standing_run(
        tmp_path,
        settings={"checkpoint": {"keep": 1}},
        content=lambda step, **_: Content(step, cast(Any, None), iter(()), 0),
    )
    saving = Saving(folder, Clock(0), run_id="run", corpus=cast(Any, corpus), order="")
    looked, damaged = list[str](), set[str]()
    patches = {"verified": verified, "save": made}
    with mock.patch.multiple(callback_saving, **patches):
        saving.after_step(run, turn(1, save=True, results=[result(1)]))
        saving.after_step(run, turn(2, save=True, results=[result(2)]))
        assert kept() == "12", "no step has followed the second"
        saving.after_step(run, turn(3, results=[result(2)]))
        saving.after_step(run, turn(4, results=[result(3, grad_norm=math.inf)]))
        assert (kept(), looked) == ("12", [])
        saving.after_step(run, turn(5, results=[result(4)]))
        assert (kept(), looked) == ("2", ["2"])
        damaged.add("6")
        saving.after_step(run, turn(6, save=True, results=[result(6)]))
        saving.after_step(run, turn(7, save=True, results=[result(7)]))
        assert (kept(), looked) == ("267", ["2", "6"])
        with mock.patch.object(shutil, "rmtree", side_effect=OSError(16, "Busy")):
            saving.after_step(run, turn(8, results=[result(8)]))
    assert looked == ["2", "6", "7"]
    assert len(list(folder.checkpoints.glob("step-*"))) == 1
    told = [note for note in reported(run).notes if not note.startswith("saved")]
    assert told[0].startswith("a damaged checkpoint, which does not count as kept: ")
    assert told[1].startswith("cannot remove ")


def test_training_goes_on_while_a_checkpoint_is_looked_at_and_older_ones_are_removed(
    tmp_path: Path,
) -> None:
    """With saves in the background: what is known is taken at the end of a later step."""
    folder, corpus = RunFolder(tmp_path), SimpleNamespace(digest="", content="", tokenizer="")
    checks, may_remove = list[Any](), threading.Event()

    class Check:
        """A look that ends when it is told to."""

        def __init__(self, path: Path, mesh: Any, store: Any) -> None:
            self.path, self.ended = path, False
            checks.append(self)

        def finish(self) -> tuple[Any, str]:
            assert self.ended, "training would wait for it"
            return WHOLE, ""

    def removed(root: Path, old: list[Path]) -> list[str]:
        assert may_remove.wait(10)
        for path in old:
            path.rmdir()
        return [f"cannot remove {path} quite" for path in old]

    class Background:
        """Saves that end when they are told to."""

        step: int | None = None
        ended = False

        def begin(self, root: Path, *, step: int, **given: Any) -> None:
            self.step, self.path = step, made(root, step=step)

        def finish(self) -> Path:
            assert self.ended, "training would wait for it"
            self.step, self.ended = None, False
            return self.path

    def after(number: int, *, finish: bool = False, **given: Any) -> None:
        results = [replace(result(number), wishes=Wishes(finish=finish))]
        saving.after_step(run, turn(number, results=results, **given))

    def kept() -> str:
        return "".join(sorted(path.name[-1] for path in folder.checkpoints.glob("step-*")))

    run = standing_run(
        tmp_path,
        settings={"checkpoint": {"keep": 1}},
        content=lambda step, **_: Content(step, cast(Any, None), iter(()), 0),
    )
    cast(Any, run.mesh).store = None
    background: Any = Background()
    saving = Saving(
        folder,
        Clock(0),
        run_id="run",
        corpus=cast(Any, corpus),
        order="",
        background=background,
    )
    patches = {"Check": Check, "_remove_all_but_weights": removed}
    with mock.patch.multiple(callback_saving, **patches):
        after(1, save=True)
        background.ended = True
        assert saving.wishes(run) == Wishes(finish=True)
        after(2, save=True, finish=True)
        assert (kept(), saving.wishes(run)) == ("12", Wishes())
        background.ended = True
        after(3, finish=True)
        (check,) = checks
        assert (check.path.name[-1], saving.wishes(run)) == ("2", Wishes())
        after(4, save=True)
        check.ended = True
        assert saving.wishes(run) == Wishes(), "the save that has begun is not over"
        background.ended = True
        after(5, finish=True)
        assert len(checks) == 2, "the one that was saved last is looked at"
        assert (kept(), saving.wishes(run)) == ("124", Wishes())
        after(6)
        assert not [note for note in reported(run).notes if "quite" in note]
        may_remove.set()
        checks[1].ended = True
        assert saving.wishes(run) == Wishes(finish=True)
        after(7, finish=True)
        saving.end(run)
    assert kept() == "4"
    problems = [note for note in reported(run).notes if "quite" in note]
    assert [note[-8:] for note in problems] == ["01 quite", "02 quite"]


def test_a_save_for_which_there_is_no_time_is_not_begun(tmp_path: Path) -> None:
    """Nobody knows how long the first one takes, and a callback kills nobody."""
    corpus = SimpleNamespace(digest="", content="", tokenizer="")
    run = standing_run(
        tmp_path,
        settings={"checkpoint": {"grace_s": 30.0}},
        content=lambda step, **_: Content(step, cast(Any, None), iter(()), 0),
    )
    saving = Saving(RunFolder(tmp_path), Clock(0), run_id="a", corpus=cast(Any, corpus), order="")
    now = 1000.0

    def slow(root: Path, *, step: int, **_: Any) -> Path:
        nonlocal now
        now += 20
        return made(root, step=step)

    def stopped(number: int, since: float | None) -> str:
        a_step = turn(number, stop=True)
        stop: Any = SimpleNamespace(since=since)
        saving.after_step(replace(run, stop=stop), a_step)
        there = (saving.checkpoints / f"step-{number:08d}").exists()
        assert there == (not a_step.unsaved)
        return a_step.unsaved

    clock = SimpleNamespace(monotonic=lambda: now)
    with mock.patch.multiple(callback_saving, save=slow, time=clock):
        assert stopped(1, since=now - 29) == ""
        assert stopped(2, since=now - 5) == ""
        assert stopped(3, since=None) == ""
        words = "the last save took 20 s, and {} s are left of checkpoint.grace_s=30"
        assert stopped(4, since=now - 11) == words.format(19)
        assert stopped(5, since=now - 99) == words.format(0)


def test_checkpoints_of_every_so_many_steps_stay(tmp_path: Path) -> None:
    folder, corpus = RunFolder(tmp_path), SimpleNamespace(digest="", content="", tokenizer="")

    run = standing_run(
        tmp_path,
        settings={"checkpoint": {"keep": 1, "keep_every": 4}},
        content=lambda step, **_: Content(step, cast(Any, None), iter(()), 0),
    )
    saving = Saving(folder, Clock(0), run_id="run", corpus=cast(Any, corpus), order="")
    patches = {"verified": lambda path, mesh: (WHOLE, ""), "save": made}
    with mock.patch.multiple(callback_saving, **patches):
        for step in range(1, 8):
            saving.after_step(run, turn(step, save=True, results=[result(step)]))
        saving.after_step(run, turn(8, results=[result(8)]))
    assert {path.name[-1] for path in folder.checkpoints.glob("step-*")} == {"4", "7"}


def test_weights_alone_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    folder, corpus = RunFolder(tmp_path), SimpleNamespace(digest="", content="", tokenizer="")
    meta = Meta(run_id="a", layout={}, coordinates={}, config={})
    pieces = [Piece("model/a", (2,), whole((2,)), torch.ones(2))]
    for step in (1, 8, 9):
        save(folder.checkpoints, step=step, pieces=pieces, meta=meta, group=Alone())

    def verified(path: Path, mesh: Any) -> tuple[Any, str]:
        return (Checkpoint.open(path) if path.name[-1] in "189" else WHOLE), ""

    run = standing_run(
        tmp_path,
        settings={"checkpoint": {"keep": 1}},
        content=lambda step, **_: Content(step, cast(Any, None), iter(()), 0),
    )
    saving = Saving(folder, Clock(0), run_id="run", corpus=cast(Any, corpus), order="")
    with mock.patch.multiple(callback_saving, verified=verified, save=made):
        for step in range(2, 6):
            saving.after_step(run, turn(step, save=True, results=[result(step)]))
        saving.after_step(run, turn(6, results=[result(6)]))
    assert {path.name[-1] for path in folder.checkpoints.glob("step-*")} == set("1589")


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
    assert samples.read_samples(tmp_path).steps[5][0].number == 1
    monkeypatch.setattr(log._writer, "_file", File())
    words = f"log.samples: cannot write to {tmp_path}: No space left on device"
    with pytest.raises(ConfigError, match=words):
        log.after_step(run, turn(6))
