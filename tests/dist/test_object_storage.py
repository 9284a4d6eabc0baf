"""Runs whose checkpoints are on object storage: those of local runs, bit for bit."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.checkpoint import Checkpoint, find_newest
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import MANIFEST, POINTER, REMOVED
from megapipe.checkpoint.storage import StorageLocation, location_of
from megapipe.testing import World, run_world
from tests.parity import object_files
from tests.parity.jobs import Outcome, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.object_server import Fault, ObjectServer, Request, serving
from tests.parity.stopped_runs import (
    BASE,
    DP,
    HALF,
    STEPS,
    TP,
    Play,
    assert_continues,
    assert_same_files,
    checkpoint,
    play_all,
)
from tests.parity.tiers import in_parts

ENTRY = "tests/parity/object_files.py"
PP = {"parallel.pp": "2", "model.dropout": "0.1"}


@pytest.fixture
def store() -> Iterator[ObjectServer]:
    object_files.register()
    with serving() as server:
        yield server


def root_of(store: ObjectServer, name: str) -> StorageLocation:
    return location_of(store.url(f"runs/{name}"), what="URL")


def stored(store: ObjectServer, name: str, step: int) -> StorageLocation:
    """Return where the checkpoint of a step of a run is stored."""
    root = root_of(store, name)
    return next(root / key.name for key in committed(root) if key.step == step)


def play_with_objects(
    world: World, base: Mapping[str, str], plays: list[Play]
) -> list[dict[str, Any]]:
    """Play this rank's part of some runs, which may use the store."""
    object_files.register()
    return play_all(world, base, plays)


def run(folder: Path, *plays: Play, world: int) -> list[list[dict[str, Any]]]:
    """Return, for each play, what each rank shows."""
    ranks = run_world(world, play_with_objects, {**tiny(folder), **BASE}, list(plays))
    return [list(outcomes) for outcomes in zip(*ranks, strict=True)]


@pytest.mark.parametrize(
    ("given", "world", "background"),
    [
        pytest.param(PP, 2, False, id="pp2", marks=pytest.mark.full),
        pytest.param(TP, 4, True, id="tp2 pp2 in the background", marks=pytest.mark.slow),
    ],
)
def test_a_run_saves_and_goes_on_as_a_local_one_does(
    given: dict[str, str], world: int, background: bool, store: ObjectServer, tmp_path: Path
) -> None:
    remote = {**given, "checkpoint.url": store.url("runs")}
    remote |= {"checkpoint.async_save": "true"} if background else {}
    local, cut, again = run(
        tmp_path,
        Play("local", given),
        Play("remote", remote, stop_after=HALF),
        Play("remote", remote),
        world=world,
    )
    assert all(part["error"] is None for part in (*local, *cut, *again))
    if background:  # the save under way may be lost
        assert again[0]["first_step"] in (0, HALF)
    else:
        assert again[0]["first_step"] == HALF
    if again[0]["first_step"]:
        assert_continues(again, local)
    for step in (HALF, STEPS):
        assert_same_files(stored(store, "remote", step), checkpoint(tmp_path, "local", step))
    assert not (tmp_path / "runs/remote/checkpoints").exists()
    keys = store.keys("runs/remote")
    # a thread of the run that was cut may write on here: what it writes is of no checkpoint
    sound = [key for key in keys if f"{key.split('/')[0]}/manifest.json" in keys]
    left = [key for key in (sound if background else keys) if "receipt" in key or "staging" in key]
    assert not left


@pytest.mark.slow
def test_another_layout_loads_what_it_loads_of_a_local_one(
    store: ObjectServer, tmp_path: Path
) -> None:
    """tp2 pp2 to dp2 pp2, by the URL of the checkpoint, that of the run, and as the latest."""
    on_store = {"checkpoint.url": store.url("runs")}
    ends = {"train.steps": str(HALF), "optimizer.schedule": "constant"}
    run(
        tmp_path, Play("local", {**TP, **ends}), Play("remote", {**TP, **ends, **on_store}), world=4
    )
    path = stored(store, "remote", HALF)
    given = {**DP, "optimizer.schedule": "constant", "train.stop_after": str(HALF + 1)}
    given |= {"checkpoint.every": "0"}
    sources = {
        "by folder": str(checkpoint(tmp_path, "local", HALF)),
        "by url": str(path),
        "by run": str(path.parent),
        "latest": "latest",
    }
    plays = [
        Play(
            f"again{n}",
            {**given, "checkpoint.load": source, **(on_store if source == "latest" else {})},
        )
        for n, source in enumerate(sources.values())
    ]
    first, *others = run(tmp_path, *plays, world=4)
    weights = {**given, "checkpoint.load": str(path), "checkpoint.load_only": "weights"}
    only = run(tmp_path, Play("weights", {**weights, "train.stop_after": "1"}), world=4)[0]
    for other in (*others, only):
        for mine, theirs in zip(other, first, strict=True):
            assert mine["error"] is None, mine["error"]
            for (*place, x), (*its, y) in zip(mine["loaded"], theirs["loaded"], strict=True):
                assert place == its
                assert np.array_equal(x, y), place
    for other in others:
        for mine, theirs in zip(other, first, strict=True):
            assert mine["steps"] == theirs["steps"]


def job(folder: Path, given: Mapping[str, str], ranks: int = 2) -> Outcome:
    return run_forked(folder, ranks, "train.py", *arguments(given), script=ENTRY)


def settings(folder: Path, store: ObjectServer, **more: str) -> dict[str, str]:
    given = {**tiny(folder), **PP, "train.steps": "6", "checkpoint.every": "2"}
    return {**given, "checkpoint.url": store.url("runs"), **more}


def notes(folder: Path, name: str) -> list[str]:
    lines = (folder / "runs" / name / "log.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [record["text"] for record in records if record["kind"] == "note"]


PHASES: dict[str, Callable[[Request], bool]] = {
    "a shard": lambda r: r.key.endswith("00001-0000.safetensors"),
    "the receipt": lambda r: r.kind == "PUT" and r.key.endswith("receipt-00001.json"),
    "the manifest": lambda r: r.kind == "PUT" and r.key.endswith(MANIFEST),
    "reading it back": lambda r: r.kind == "HEAD" and r.key.endswith(MANIFEST),
    "the pointer": lambda r: r.kind == "PUT" and r.key.endswith(POINTER),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run that nobody kills, with local checkpoints, and return its folder."""
    folder = tmp_path_factory.mktemp("whole")
    given = settings(folder, ObjectServer(), **{"run.name": "whole"})
    del given["checkpoint.url"]
    assert job(folder, given).codes == [0, 0]
    return folder


@in_parts("phase", PHASES, full=["the manifest"])
def test_a_run_that_is_killed_in_a_save_goes_on(
    phase: str, whole: Path, store: ObjectServer, tmp_path: Path
) -> None:
    """One rank by -9, in the second save; its end is that of a run that nobody killed."""
    root = root_of(store, "run")

    def fault(_: int, request: Request) -> Fault | None:
        keys = [request.key.removeprefix("runs/run/"), *store.keys("runs/run")]
        if any(key.startswith("step-00000004-") for key in keys) and PHASES[phase](request):
            os.kill(request.process, signal.SIGKILL)
            return "drop"
        return None

    store.fault = fault
    given = settings(tmp_path, store)
    outcome = job(tmp_path, given)
    assert -signal.SIGKILL in outcome.codes, outcome.text
    store.fault = lambda _, request: None
    saved = phase in ("reading it back", "the pointer")
    newest = find_newest(root).path
    assert newest is not None
    assert Checkpoint.open(newest).step == (4 if saved else 2)
    outcome = job(tmp_path, given)
    assert outcome.codes == [0, 0], outcome.text
    assert any("resumed from" in note for note in notes(tmp_path, "run"))
    left = {key.split("/")[0] for key in store.keys("runs/run")}
    assert left == {POINTER, *(key.name for key in committed(root))}
    assert_same_files(stored(store, "run", 6), checkpoint(whole, "whole", 6))


@pytest.mark.full
def test_old_checkpoints_go_and_exports_are_made(store: ObjectServer, tmp_path: Path) -> None:
    given = settings(tmp_path, store, **{"checkpoint.keep": "1", "checkpoint.export_every": "4"})
    outcome = job(tmp_path, given)
    assert outcome.codes == [0, 0], outcome.text
    keys = committed(root_of(store, "run"))
    assert keys[0].step == 6
    assert len(keys) <= 2
    assert {key.split("/")[0] for key in store.keys("runs/run")} == {
        POINTER,
        REMOVED,
        *(key.name for key in keys),
    }
    assert [path.name for path in (tmp_path / "runs/run/exports").iterdir()] == ["step-00000004"]


@pytest.mark.full
def test_nothing_follows_from_checkpoints_that_cannot_be_read(
    store: ObjectServer, tmp_path: Path
) -> None:
    """The store answers with half of each shard in a start, then with 503 at a removal."""
    given = settings(tmp_path, store, **{"checkpoint.keep": "1"})
    assert job(tmp_path, {**given, "train.stop_after": "4", "checkpoint.keep": "2"}).codes == [0, 0]
    keys = store.keys("runs/run")
    store.fault = lambda _, request: "short" if request.key.endswith(".safetensors") else None
    outcome = job(tmp_path, given)
    outcome.assert_one_line(5, "/step-00000004-", "the store sent", "it may be intact")
    assert store.keys("runs/run") == keys
    older = next(key.name for key in committed(root_of(store, "run")) if key.step == 2)
    store.fault = lambda _, request: (
        "error" if request.kind == "GET" and older in request.key else None
    )
    outcome = job(tmp_path, {**given, "checkpoint.every": "1"})
    assert outcome.codes == [0, 0], outcome.text
    left = "older checkpoints are not removed before the next save: cannot read "
    assert any(note.startswith(left) and older in note for note in notes(tmp_path, "run"))
    store.fault = lambda _, request: None
    assert job(tmp_path, {**given, "checkpoint.every": "1", "train.steps": "8"}).codes == [0, 0]
    assert [key.step for key in committed(root_of(store, "run"))] == [8, 7]


@pytest.mark.full
def test_a_store_that_does_not_serve_ends_the_run_in_a_line(
    store: ObjectServer, tmp_path: Path
) -> None:
    """A bucket that is not there; a server that is mute in the second save."""
    given = settings(tmp_path, store)
    given["checkpoint.url"] = store.url("x").replace("bucket", "no")
    job(tmp_path, given).assert_one_line(5, "there is no such object or bucket", "/no/x/run/")
    store.fault = lambda _, request: "mute" if "/step-00000004-" in request.key else None
    outcome = job(tmp_path, settings(tmp_path, store))
    outcome.assert_one_line(5, "checkpoint not saved: rank", "no answer in 3.33 s (2 tries in 7")
    store.fault = lambda _, request: None
    newest = find_newest(root_of(store, "run")).path
    assert newest is not None
    assert Checkpoint.open(newest).step == 2
