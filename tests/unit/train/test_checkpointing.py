"""Saving: when checkpoints are due, which stay, and what training does not wait for."""

from __future__ import annotations

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

import torch

from megapipe.checkpoint import Checkpoint, Meta, Piece, SingleProcess, save, whole
from megapipe.checkpoint.local import LocalPath
from megapipe.train.callbacks import RankRequests, Run
from megapipe.train.callbacks import checkpointing as callback_saving
from megapipe.train.callbacks.checkpointing import Checkpointing, Clock
from megapipe.train.run_folder import RunFolder
from megapipe.train.state import SaveArguments
from tests.unit.train.stub_run import STEPS, asked, keeps, reported, result, standing_run, turn


def test_checkpoints_are_due_by_steps_by_the_clock_and_at_the_end(tmp_path: Path) -> None:
    settings = {"checkpoint": {"every": 3}}
    corpus: Any = None
    saved: list[tuple[int, bool]] = []
    for rank, decides in ((0, True), (1, False)):
        run = standing_run(tmp_path, rank=rank, settings=settings)
        saving = Checkpointing(
            RunFolder(tmp_path), Clock(1e-9), run_id="run", corpus=corpus, order=""
        )
        assert asked(saving, run, "save") == [3, 6, 9, STEPS]
        assert keeps(saving, run, "save")
        time.sleep(1e-3)
        assert saving.requests(run) == RankRequests(save=decides), "one clock for all"
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
    """Make an empty folder in place of a save."""
    path = root / f"step-{step:08d}"
    path.mkdir(parents=True)
    return path


def saving_run(
    folder: Path, background: Background | None = None, **settings: Any
) -> tuple[Run, Checkpointing]:
    """Make a run with these settings of ``checkpoint``, and the callback that saves."""
    run = standing_run(
        folder,
        settings={"checkpoint": settings},
        content=lambda step, **_: SaveArguments(step, cast(Any, None), iter(()), 0),
    )
    cast(Any, run.mesh).store = None
    corpus: Any = SimpleNamespace(digest="", content="", tokenizer="")
    given = {"corpus": corpus, "order": "", "background": cast(Any, background)}
    return run, Checkpointing(RunFolder(folder), Clock(0), run_id="run", **given)


def kept(saving: Checkpointing) -> str:
    """Return the steps that have checkpoints, a digit each."""
    return "".join(sorted(path.name[-1] for path in saving.checkpoints.glob("step-*")))


class Background:
    """Asynchronous saves that end when they are told to."""

    step: int | None = None
    ended = False

    def begin(self, root: Path, *, step: int, **given: Any) -> None:
        self.step, self.path = step, made(root, step=step)

    def finish(self) -> Path:
        assert self.ended, "training would wait for it"
        self.step, self.ended = None, False
        return self.path


def test_old_checkpoints_go_when_a_finite_step_has_followed_the_newest(tmp_path: Path) -> None:
    """What is damaged does not count as kept, and what cannot be removed is told."""

    def verified(path: Path, mesh: Any) -> tuple[Any, str]:
        looked.append(path.name[-1])
        return (None, f"{path} is damaged") if path.name[-1] in damaged else (WHOLE, "")

    run, saving = saving_run(tmp_path, keep=1)
    looked, damaged = list[str](), set[str]()
    patches = {"verified": verified, "save": made}
    with mock.patch.multiple(callback_saving, **patches):
        saving.after_step(run, turn(1, save=True, results=[result(1)]))
        saving.after_step(run, turn(2, save=True, results=[result(2)]))
        assert kept(saving) == "12", "no step has followed the second"
        saving.after_step(run, turn(3, results=[result(2)]))
        saving.after_step(run, turn(4, results=[result(3, grad_norm=math.inf)]))
        assert (kept(saving), looked) == ("12", [])
        saving.after_step(run, turn(5, results=[result(4)]))
        assert (kept(saving), looked) == ("2", ["2"])
        damaged.add("6")
        saving.after_step(run, turn(6, save=True, results=[result(6)]))
        saving.after_step(run, turn(7, save=True, results=[result(7)]))
        assert (kept(saving), looked) == ("267", ["2", "6"])
        with mock.patch.object(shutil, "rmtree", side_effect=OSError(16, "Busy")):
            saving.after_step(run, turn(8, results=[result(8)]))
    assert looked == ["2", "6", "7"]
    assert len(kept(saving)) == 1
    told = [note for note in reported(run).notes if not note.startswith("saved")]
    assert told[0].startswith("a damaged checkpoint does not count as kept: ")
    assert told[1].startswith("cannot remove ")


def test_training_goes_on_while_a_checkpoint_is_looked_at_and_older_ones_are_removed(
    tmp_path: Path,
) -> None:
    """Saves are asynchronous: what is known is taken at the end of a later step."""
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

    def after(number: int, *, finish: bool = False, **given: Any) -> None:
        results = [replace(result(number), requests=RankRequests(finish_save=finish))]
        saving.after_step(run, turn(number, results=results, **given))

    background = Background()
    run, saving = saving_run(tmp_path, background, keep=1)
    patches = {"AsyncVerify": Check, "_remove_all_but_weights": removed}
    with mock.patch.multiple(callback_saving, **patches):
        after(1, save=True)
        background.ended = True
        assert saving.requests(run) == RankRequests(finish_save=True)
        after(2, save=True, finish=True)
        assert (kept(saving), saving.requests(run)) == ("12", RankRequests())
        background.ended = True
        after(3, finish=True)
        (check,) = checks
        assert (check.path.name[-1], saving.requests(run)) == ("2", RankRequests())
        after(4, save=True)
        check.ended = True
        assert saving.requests(run) == RankRequests(), "the save that has begun is not over"
        background.ended = True
        after(5, finish=True)
        assert len(checks) == 2, "the one that was saved last is looked at"
        assert (kept(saving), saving.requests(run)) == ("124", RankRequests())
        after(6)
        assert not [note for note in reported(run).notes if "quite" in note]
        may_remove.set()
        checks[1].ended = True
        assert saving.requests(run) == RankRequests(finish_save=True)
        after(7, finish=True)
        saving.end(run)
    assert kept(saving) == "4"
    problems = [note for note in reported(run).notes if "quite" in note]
    assert [note[-8:] for note in problems] == ["01 quite", "02 quite"]


def test_a_save_may_begin_while_older_checkpoints_are_removed(tmp_path: Path) -> None:
    """The folder of the save is not taken for one that a killed save has left."""

    class Staging(Background):
        """Saves that are in a folder of another name until they end."""

        def begin(self, root: Path, *, step: int, **given: Any) -> None:
            self.step, self.ended = step, True
            self.staging = root / LocalPath(root).stage(step, 0, str)
            if step == 4:
                may_remove.set()

        def finish(self) -> Path:
            os.rename(self.staging, made(self.staging.parent, step=cast(int, self.step)))
            self.path = self.staging.parent / f"step-{self.step:08d}"
            return super().finish()

    def late(root: Path, old: list[Path]) -> list[str]:
        assert may_remove.wait(10)
        return remove_all(root, old)

    def check(path: Path, mesh: Any, store: Any) -> Any:
        return SimpleNamespace(path=path, ended=True, finish=lambda: (WHOLE, ""))

    may_remove, remove_all = threading.Event(), callback_saving._remove_all_but_weights
    background = Staging()
    run, saving = saving_run(tmp_path, background, keep=1)
    with mock.patch.multiple(callback_saving, AsyncVerify=check, _remove_all_but_weights=late):
        for step in range(1, 5):
            saving.after_step(run, turn(step, save=True, results=[result(step)]))
        saving._await_removal(run)
        assert (kept(saving), background.staging.is_dir()) == ("23", True)
        saving.finish(run, leaves=True)
    assert kept(saving) == "234"
    assert not list(saving.checkpoints.glob(".staging-*"))


def test_a_save_for_which_there_is_no_time_is_not_begun(tmp_path: Path) -> None:
    """Nobody knows how long the first one takes, and a callback kills nobody."""
    run, saving = saving_run(tmp_path, grace_s=30.0)
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
    run, saving = saving_run(tmp_path, keep=1, keep_every=4)
    patches = {"verified": lambda path, mesh: (WHOLE, ""), "save": made}
    with mock.patch.multiple(callback_saving, **patches):
        for step in range(1, 8):
            saving.after_step(run, turn(step, save=True, results=[result(step)]))
        saving.after_step(run, turn(8, results=[result(8)]))
    assert kept(saving) == "47"


def test_weights_alone_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    run, saving = saving_run(tmp_path, keep=1)
    meta = Meta(run_id="a", layout={}, coordinates={}, config={})
    pieces = [Piece("model/a", (2,), whole((2,)), torch.ones(2))]
    for step in (1, 8, 9):
        save(saving.checkpoints, step=step, pieces=pieces, meta=meta, group=SingleProcess())

    def verified(path: Path, mesh: Any) -> tuple[Any, str]:
        return (Checkpoint.open(path) if path.name[-1] in "189" else WHOLE), ""

    with mock.patch.multiple(callback_saving, verified=verified, save=made):
        for step in range(2, 6):
            saving.after_step(run, turn(step, save=True, results=[result(step)]))
        saving.after_step(run, turn(6, results=[result(6)]))
    assert kept(saving) == "1589"
