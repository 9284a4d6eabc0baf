"""A monitor of processes that note what they do, and some of them hang."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.watch.hang_diagnosis import RankView
from megapipe.watch.journal import JournalState
from megapipe.watch.monitor import Monitor, Settings
from megapipe.watch.monitor_link import MonitorClient, MonitorServer
from megapipe.watch.rank import _start
from tests.parity.jobs import ROOT

RANK = """
import sys, time, signal, os, faulthandler
sys.path.insert(0, {root!r})
from pathlib import Path
from megapipe.watch.journal import BEATS, LEFT, VERDICT, Journal, text
from megapipe.watch.monitor import STACKS
folder, rank, waits = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "waits"
mine = Journal()
mine.publish(folder, rank)
faulthandler.register(STACKS, open(folder / f"rank-{{rank}}.stacks", "w"))
line = mine.counter("a", [0, 1])
mine.set_activity(text("a task"))
def live():
    while not mine.words[VERDICT]:
        mine.words[BEATS] += 1
        time.sleep(0.05)
line.wait(line.count(), live) if waits else live()
mine.words[LEFT] = 1
"""


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Have rank 0 wait for rank 1, which is busy."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(root=str(ROOT)))
    folder = tmp_path / "watch"
    folder.mkdir()
    started = [
        subprocess.Popen([sys.executable, str(script), str(folder), str(rank), does])
        for rank, does in enumerate(("waits", "works"))
    ]
    until = time.monotonic() + 20.0
    while not all((folder / f"rank-{rank}.lines").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.02)
    yield started
    kill(started)


def kill(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def settings(tmp_path: Path, limit_s: float, starter: int) -> Settings:
    return Settings(str(tmp_path / "watch"), limit_s, str(tmp_path / "hangs"), starter)


def watch(tmp_path: Path, limit_s: float = 0.5) -> tuple[str, Path]:
    """Be the monitor; return the verdict and the folder of the report."""
    Monitor(settings(tmp_path, limit_s, os.getppid())).run()
    verdict, report = json.loads((tmp_path / "watch" / "verdict").read_text())
    return verdict, Path(report)


def test_ranks_hear_the_verdict(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    verdict, report = watch(tmp_path)
    assert [process.wait(30) for process in ranks] == [0, 0], "by themselves"
    assert "rank 1 (process " in verdict
    assert "makes no progress" in verdict
    assert "rank 0 waits for it" in verdict
    assert "rank.py" in (report / "rank-1.txt").read_text()
    told = json.loads((report / "rank-0.json").read_text())
    assert told["state"]["does"] == "a task"
    assert 0.0 < time.time() - told["noticed"] < 60.0


def test_a_stopped_rank_is_killed(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    ranks[1].send_signal(signal.SIGSTOP)
    verdict, _ = watch(tmp_path)
    assert [process.wait(30) for process in ranks] == [0, -signal.SIGKILL]
    assert "is stopped by a signal" in verdict


def test_a_rank_that_is_gone(tmp_path: Path, ranks: list[subprocess.Popen[bytes]]) -> None:
    kill(ranks[1:])
    verdict, report = watch(tmp_path, limit_s=600.0)
    assert ranks[0].wait(30) == 0
    assert verdict.startswith("rank 0 lost contact with rank 1 (process ")
    assert "ended without an error message" in verdict
    assert json.loads((report / "rank-1.json").read_text())["gone"]


def test_ranks_that_are_gone_when_it_begins(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]]
) -> None:
    """Another node's monitor hears of them."""
    kill(ranks)
    listens = socket.create_server(("127.0.0.1", 0))
    address = listens.getsockname()
    hub = MonitorServer(listens.detach(), "word")
    given = settings(tmp_path, 600.0, starter=-1)
    Monitor(given._replace(hub=address, token="word")).run()
    assert [view.gone for view in hub.views().values()] == [True, True]


@pytest.mark.full
@pytest.mark.parametrize("comes", [True, False])
def test_the_one_that_decides_waits_for_who_has_not_reached_it_yet(
    comes: bool, tmp_path: Path, ranks: list[subprocess.Popen[bytes]]
) -> None:
    """The ranks of the one that decides are gone before that; else nobody would know. It does not
    wait for ever."""
    kill(ranks)
    listens = socket.create_server(("127.0.0.1", 0))
    address = listens.getsockname()
    given = settings(tmp_path, 600.0, starter=-1)
    monitor = Monitor(given._replace(listens=listens.detach(), token="word"))
    deciding = threading.Thread(target=monitor.run)
    deciding.start()
    time.sleep(1.0)
    assert deciding.is_alive()
    said = None
    if comes:
        state = JournalState(7, 9, 0, "the corpus", "pp 1", {}, None, 0, (), False)
        view = RankView(state, 0.0, 0.0, False, "node1")
        spoke = MonitorClient(address, "word")
        while deciding.is_alive() and said is None:
            said = spoke.exchange({2: view}, at_once=True)
            time.sleep(0.05)
    deciding.join(30.0)
    assert not deciding.is_alive()
    if comes:
        assert said is not None
        assert "ended without an error message" in said


def test_ranks_that_go_on_are_left_alone(
    tmp_path: Path, ranks: list[subprocess.Popen[bytes]]
) -> None:
    """A monitor ends with its ranks, and takes its folder with it."""
    monitor = _start(settings(tmp_path, 60.0, os.getpid()), None)
    time.sleep(1.0)
    assert monitor.poll() is None
    monitor.send_signal(signal.SIGTERM)  # as a launcher sends to all
    for process in ranks:
        assert process.poll() is None
        process.kill()
        process.wait()
    assert monitor.wait(30) == 0
    assert not (tmp_path / "watch").exists()


def test_a_monitor_without_ranks_ends_with_who_has_started_it(tmp_path: Path) -> None:
    (tmp_path / "watch").mkdir()
    child = os.fork()
    if child == 0:
        _start(settings(tmp_path, 60.0, os.getpid()), None)
        os._exit(0)
    os.waitpid(child, 0)
    until = time.monotonic() + 20.0
    while (tmp_path / "watch").exists():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_rank_that_ends_before_it_has_told_the_settings_leaves_no_trace() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "megapipe.watch"],
        input="",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("", "")
