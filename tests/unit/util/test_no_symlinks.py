"""No file of a run is written through a symbolic link in its folder, whoever writes it and when."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megapipe.cli import parse
from megapipe.config.config import Config, LogConfig
from megapipe.errors import CheckpointError
from megapipe.layout.resolve import resolve
from megapipe.observe.jsonl import JsonlSink
from megapipe.observe.observer import build_sinks
from megapipe.observe.out_of_memory import out_of_memory
from megapipe.observe.profile import MERGED, StepProfile, merge
from megapipe.observe.sample_log import SampleWriter, new_start
from megapipe.observe.timeline import write_timeline
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.timing.simulate import simulate
from megapipe.train import run_folder
from megapipe.train.auto import FILE, AutoSchedule
from megapipe.train.callbacks import Step, exporting
from megapipe.train.callbacks.reports import Reports
from megapipe.util import heartbeat
from megapipe.util.no_symlinks import make_folder, open_no_symlinks, write_no_symlinks
from megapipe.watch import monitor, rank
from tests.parity.outside import make_outside, untouched
from tests.unit.train.stub_run import reported, result, standing_run

pytestmark = pytest.mark.usefixtures("without_git")

WORDS = "is a symbolic link, through which a run does not write"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    return make_outside(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_files_and_folders_are_made(run: Path, tmp_path: Path) -> None:
    write_no_symlinks(run, "a/b/c.txt", "ä")
    write_no_symlinks(run, "a/b/c.txt", "ö")
    with open_no_symlinks(run, "a/b/c.txt", "ab", buffering=0) as file:
        file.write(b"!")
    assert (run / "a/b/c.txt").read_text(encoding="utf-8") == "ö!"
    assert make_folder(tmp_path / "new", "x/y") == tmp_path / "new/x/y"
    assert make_folder(tmp_path / "new", "x/y").is_dir()
    with pytest.raises(NotADirectoryError):
        write_no_symlinks(run, "a/b/c.txt/d", "")
    with pytest.raises(FileNotFoundError):
        write_no_symlinks(tmp_path / "gone", "d", "")
    assert (run / "a/b/c.txt").stat().st_mode & 0o111 == 0


@pytest.mark.parametrize("target", ["outside/file", "outside/new", "nowhere/at/all"])
def test_a_file_that_is_a_link(target: str, run: Path, outside: Path) -> None:
    (run / "x").symlink_to(outside.parent / target)
    for mode in ("w", "ab", "a+b", "xb", "r+b"):
        with pytest.raises(OSError, match=f"{run / 'x'} {WORDS}"):
            open_no_symlinks(run, "x", mode)
    assert untouched(outside)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_folder_on_the_way_that_is_a_link(depth: int, run: Path, outside: Path) -> None:
    link = run.joinpath(*"ab"[:depth])
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    with pytest.raises(OSError, match=f"{link} {WORDS}"):
        write_no_symlinks(run, "a/b/file", "x")
    with pytest.raises(OSError, match=f"{link} {WORDS}"):
        make_folder(run, "a/b")
    assert untouched(outside)


def test_a_link_that_is_made_after_the_look_is_not_followed(
    run: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system call refuses it, not the look that has the words."""
    monkeypatch.setattr("megapipe.util.no_symlinks._refuse_link", lambda *_: None)
    (run / "file").symlink_to(outside / "file")
    (run / "folder").symlink_to(outside)
    for name in ("file", "folder/file"):
        with pytest.raises(OSError, match=r"Too many levels|Not a directory"):
            write_no_symlinks(run, name, "x")
    assert untouched(outside)


def test_the_folder_itself_may_be_a_link(run: Path, tmp_path: Path) -> None:
    """A run that lies on another disk."""
    (tmp_path / "linked").symlink_to(run)
    write_no_symlinks(tmp_path / "linked", "a/b", "x")
    make_folder(tmp_path / "linked", "c")
    assert (run / "a/b").read_text() == "x"
    taken = run_folder.RunFolder(tmp_path / "linked")
    run_folder._take(taken)
    run_folder.open_reports(taken.path, Config(), None).close()
    taken.release()
    assert (run / "log.jsonl").exists()


def drawn(run: Path) -> None:
    cost = Cost(1.0, 1.0, 2.0)
    write_timeline(run, 2, simulate(build("1f1b", ranks=2, microbatches=2), cost), cost)


def profiled(run: Path) -> None:
    profile = StepProfile(run, 2, rank=0, place="pp 0", on_gpu=False)
    profile.start()
    torch.ones(2) + 1
    profile.stop()


def merged(run: Path) -> None:
    trace = b'{"megapipe": {"rank": 0, "place": "x"}, "baseTimeNanoseconds": 0, "traceEvents": []}'
    (run / "profile/step_000002/rank_0000.json.gz").write_bytes(gzip.compress(trace))
    merge(run / "profile/step_000002")


def logged(run: Path) -> None:
    SampleWriter(new_start(run, 0), 0)


def logged_by_another(run: Path) -> None:
    """Log as rank 1, which knows that rank 0 has made the folder of the start."""
    SampleWriter(run / "samples/001-after-0", 1)


def told_of_memory(run: Path) -> None:
    config, layout = resolve(
        parse([f"run.folder={run.parent}", f"run.name={run.name}"]).config, None, 257
    )
    said = str(out_of_memory(MemoryError(), config, layout, 0))
    if WORDS in said:
        raise OSError(said)


def snapshot(run: Path) -> None:
    dump = mock.Mock(side_effect=lambda path: Path(path).write_text("x"))
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda.memory, "_dump_snapshot", dump),
    ):
        told_of_memory(run)


def summed_up(run: Path) -> None:
    standing = standing_run(run)
    reports = Reports(skipped=0, entropy=None)
    reports.begin(standing)
    reports.after_step(standing, Step(5, last=False, results=[result(5)]))
    reports.end(standing)
    raise OSError(reported(standing).notes[-1])


def opened(run: Path) -> None:
    run_folder.open_reports(run, Config(), None)


def watched(run: Path) -> None:
    settings = monitor.Settings(str(run.parent), 1.0, str(run / "hangs"), os.getpid())
    with (
        mock.patch.object(monitor.time, "strftime", return_value="now"),
        mock.patch.object(monitor.socket, "gethostname", return_value="here"),
        mock.patch.object(monitor.time, "sleep"),
    ):
        looks = monitor.Monitor(settings)
        view = mock.Mock(_asdict=dict)
        looks._ranks[0] = mock.Mock(
            view=lambda: view, state=mock.Mock(_asdict=dict), spec=monitor._Rank
        )
        (run.parent / "rank-0.stacks").write_text("stacks")
        if looks._report() is None:
            raise OSError(WORDS)


def recorded(run: Path) -> None:
    mine = rank.RankWatch.__new__(rank.RankWatch)
    mine._rank, mine._flight_record = 0, lambda: b"flight"
    mine._write_flight_record(str(run / "hangs/now-here"))


def found(run: Path) -> None:
    """Write what schedule auto writes, as far as it comes."""
    auto: Any = AutoSchedule.__new__(AutoSchedule)
    notes: list[str] = []
    schedule = build("1f1b", ranks=2, microbatches=2)
    auto.path, auto.note, auto.limit = run / FILE, notes.append, 9.0
    auto.train_step, auto.records, auto.last_step = mock.Mock(schedule=schedule), [], []
    auto._found = lambda *_: mock.Mock(schedule=schedule, value=1.0)
    auto._advise = lambda *_: None
    names = ("timeline", "typical_latency")
    with (
        mock.patch.multiple("megapipe.train.auto", **{name: mock.Mock() for name in names}),
        mock.patch("megapipe.train.auto.measured_cost", return_value=Cost(1.0, 1.0, 1.0)),
        mock.patch("megapipe.train.auto.replace", lambda cost, **_: cost),
    ):
        auto._search()
    raise OSError(notes[-1])


def beaten(run: Path) -> None:
    with heartbeat.beating(run / ".lock.1/owner"):
        if not (run / ".lock.1/owner").exists():
            raise OSError(WORDS)


def exported(run: Path) -> None:
    standing = standing_run(run, settings={"checkpoint": {"export_every": 1}})
    saving: Any = mock.Mock(newest=run / "checkpoints/step-00000001")
    with (
        mock.patch.object(exporting, "export", lambda _, output, **__: output.mkdir()),
        mock.patch.object(exporting.Checkpoint, "open"),
    ):
        exporting.Exporting(saving).after_step(standing, Step(1, last=False))


def with_tensorboard(run: Path) -> None:
    build_sinks(Config(log=LogConfig(tensorboard=True)), run, {}).close()


def with_wandb(run: Path) -> None:
    build_sinks(Config(log=LogConfig(wandb="offline")), run, {}).close()


WRITERS: list[tuple[str, Callable[[Path], None]]] = [
    *((name, drawn) for name in ("timeline/step_000002.json", "timeline/step_000002.svg")),
    *((name, profiled) for name in ("profile", "profile/step_000002")),
    ("profile/step_000002/rank_0000.json.gz", profiled),
    (f"profile/step_000002/{MERGED}", merged),
    *((name, told_of_memory) for name in ("out_of_memory", "out_of_memory/plan.txt")),
    ("out_of_memory/rank_0000.pickle", snapshot),
    *(("samples", writer) for writer in (logged, logged_by_another)),
    *((f"samples/001-after-0{name}", logged_by_another) for name in ("", "/rank-00001.jsonl")),
    ("summary.json", summed_up),
    *((name, opened) for name in ("config.yaml", "provenance.json")),
    ("log.jsonl", lambda run: JsonlSink(run / "log.jsonl").close()),
    *((name, watched) for name in ("hangs", "hangs/now-here", "hangs/now-here/rank-0.json")),
    ("hangs/now-here/rank-0.txt", watched),
    ("hangs/now-here/rank-0.flight.json", recorded),
    ("schedule.tmp", found),
    (".lock.1/.owner", beaten),
    ("exports", exported),
]


@pytest.mark.parametrize(("name", "write"), WRITERS)
@pytest.mark.parametrize("target", ["file", "", "new"])
def test_a_link_in_the_place_of_what_is_written(
    name: str, write: Callable[[Path], None], target: str, run: Path, outside: Path
) -> None:
    """It leads to a file, a folder or nothing: it is told, and what is outside stays as it is."""
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).symlink_to(outside / target)
    with pytest.raises((OSError, CheckpointError, run_folder.ConfigError), match=WORDS):
        write(run)
    assert untouched(outside)
    assert (run / name).is_symlink()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "wandb_id"])
def test_a_link_in_the_place_of_what_a_sink_writes(
    name: str, run: Path, outside: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / name).symlink_to(outside if name != "wandb_id" else outside / "file")
    (with_tensorboard if name == "tensorboard" else with_wandb)(run)
    assert WORDS in caplog.text
    assert untouched(outside)
