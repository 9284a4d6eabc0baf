"""One job at a time in a run folder: who holds it, who takes over, who is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.run_lock import OWNER, RunLock
from megapipe.errors import CheckpointError, ConfigError, LaunchError
from megapipe.util import heartbeat


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(heartbeat, "STALE_S", 0.3)
    monkeypatch.setattr(heartbeat, "POLL_S", (0.01, 0.01))


def leave(folder: Path, owner: heartbeat.Owner, number: int = 1) -> Path:
    """Write the owner file that a killed job leaves behind."""
    place = folder / f".lock.{number}" / OWNER
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(asdict(owner)))
    return place


def test_a_second_job_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    words = rf"{re.escape(str(tmp_path))} is in use by process {os.getpid()} on .* since 20.* UTC"
    with pytest.raises(ConfigError, match=words):
        RunLock(tmp_path)
    first.check()
    first.release()
    first.release()
    assert list(tmp_path.iterdir()) == []
    second = RunLock(tmp_path)
    assert second.taken_over is None
    second.release()


def test_of_many_that_begin_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    leave(tmp_path, replace(heartbeat.Owner.this_process(), began=1.0))
    barrier, found = threading.Barrier(8), list[RunLock | ConfigError]()

    def begin() -> None:
        barrier.wait(10)
        try:
            found.append(RunLock(tmp_path))
        except ConfigError as error:
            found.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    (winner,) = (each for each in found if isinstance(each, RunLock))
    assert len(found) == 8
    winner.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"process": 2**22 + 1}, {"began": 1.0}])
def test_a_killed_job_of_this_machine_is_taken_over_from_at_once(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STALE_S", 1e9)
    killed = replace(heartbeat.Owner.this_process(), **change)
    leave(tmp_path, killed)
    lock = RunLock(tmp_path)
    assert lock.taken_over == killed
    assert [path.name for path in tmp_path.iterdir()] == [".lock.2"]
    lock.release()


def test_a_job_elsewhere_is_gone_when_its_count_stands_still(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    far = replace(heartbeat.Owner.this_process(), host="far", machine="far")
    leave(tmp_path, far)
    lock = RunLock(tmp_path)
    assert lock.taken_over == far
    lock.release()
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        f"checking whether process {os.getpid()} on far, which had locked {tmp_path}, is alive"
    ) in line


def test_a_job_elsewhere_that_counts_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "STALE_S", 20.0)
    far = replace(heartbeat.Owner.this_process(), host="far", machine="far", since=0.0)
    place = leave(tmp_path, far)
    ended = threading.Event()

    def count() -> None:
        number = 0
        while not ended.wait(0.02):
            number += 1
            place.with_name("new").write_text(json.dumps(asdict(replace(far, count=number))))
            place.with_name("new").rename(place)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="on far since 1970-01-01 00:00:00 UTC"):
            RunLock(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == [".lock.1"]


def test_a_number_that_a_third_job_was_given_meanwhile_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed job is seen; before this one has made its folder another took over and ended, and a
    third began with the first number anew."""
    me = heartbeat.Owner.this_process()
    leave(tmp_path, replace(me, began=1.0))
    real = Path.mkdir

    def mkdir(path: Path, *args: Any, **options: Any) -> None:
        if path.name == ".lock.2":
            leave(tmp_path, me)
        real(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ConfigError, match="is in use by"):
        RunLock(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock.1"]


def test_a_job_that_lost_its_folder_while_it_slept_writes_nothing_more(tmp_path: Path) -> None:
    first = RunLock(tmp_path)
    (tmp_path / ".lock.1").rename(tmp_path / "slept")
    second = RunLock(tmp_path)
    with pytest.raises(LaunchError, match=f"was taken over by process {os.getpid()} on"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_folder_that_was_removed_under_a_job_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"run cannot be read any more: No such file or dir"):
        lock.check()
    lock.release()


def test_a_run_folder_that_is_removed_and_made_again_was_not_taken_over(tmp_path: Path) -> None:
    """A writer that makes the folders of its file has made it again."""
    (run := tmp_path / "run").mkdir()
    lock = RunLock(run)
    shutil.rmtree(run)
    run.mkdir()
    with pytest.raises(CheckpointError, match=r"/run or its lock was removed"):
        lock.check()
