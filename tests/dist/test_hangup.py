"""A terminal that closes: the run saves and stops, unless nohup was to keep it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megapipe.launch.signals import REPEAT_S
from tests.parity.jobs import ENDLESS, Job, Outcome, arguments, tiny

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    """Give the signal its default action: processes inherit that it is ignored, as by nohup, which
    these tests may be under themselves."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def endless(folder: Path, **more: str) -> list[str]:
    return arguments({**tiny(folder), **ENDLESS, "parallel.pp": "2", **more})


def assert_saved(outcome: Outcome, folder: Path) -> None:
    assert set(outcome.codes) == {75}, outcome.text
    assert len(outcome.errors) == 1, outcome.text
    assert "stopped by a signal; saved step" in outcome.errors[0]
    assert list((folder / "runs/run/checkpoints").glob("step-*/manifest.json")), outcome.text


def test_a_hangup_of_one_rank_saves_all(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.launch(2, *endless(tmp_path))
        job.await_text("| loss")
        os.kill(job.pids()[1], signal.SIGHUP)
        assert_saved(job.end(), tmp_path)


@pytest.mark.slow
def test_hangups_are_as_many_as_like_to_be(tmp_path: Path) -> None:
    """Shell and system may both send it when a terminal closes, at times of their own; a request
    of a scheduler after them is its first."""
    given = endless(tmp_path)
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("| loss")
        waiting, stopped = job.processes
        stopped.send_signal(signal.SIGSTOP)
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
            waiting.send_signal(number)
            time.sleep(REPEAT_S + 0.2)
            assert waiting.poll() is None
        stopped.send_signal(signal.SIGCONT)
        assert_saved(job.end(), tmp_path)


def test_a_hangup_before_the_first_step(tmp_path: Path) -> None:
    given = endless(tmp_path, **{"parallel.timeout_s": "600"})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_handlers()
        job.processes[1].send_signal(signal.SIGHUP)
        job.end().assert_one_line(75, "stopped by SIGHUP before the first step")


def test_a_hangup_before_a_launcher_has_ranks(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.launch(2, *endless(tmp_path))
        job.await_handlers()
        job.processes[0].send_signal(signal.SIGHUP)
        job.end().assert_one_line(75, "stopped by SIGHUP before the ranks started")


@pytest.mark.slow
def test_a_run_under_nohup_goes_on(tmp_path: Path) -> None:
    """Under nohup, SIGHUP is ignored from the beginning."""

    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    given = endless(tmp_path, **{"log.every": "1"})
    with Job(tmp_path) as job:
        job.start(["-m", "megapipe.launch", "--nproc", "2", "train.py", *given], preexec_fn=nohup)
        job.await_text("| loss")
        for pid in (job.processes[0].pid, *job.pids().values()):
            os.kill(pid, signal.SIGHUP)
        time.sleep(1.0)
        said = len(job.text)
        job.await_text("| loss", after=said)
        job.processes[0].send_signal(signal.SIGTERM)
        assert_saved(job.end(), tmp_path)


def on_terminal(slave: int) -> Callable[[], None]:
    """Become the first process of a session that has this terminal."""

    def begin() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    return begin


@pytest.mark.parametrize("launched", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_terminal_that_closes(launched: bool, tmp_path: Path) -> None:
    """The system sends the signal; nothing can be written any more, and the log has all."""
    master, slave = os.openpty()
    given = endless(tmp_path, **{"parallel.pp": "2" if launched else "1", "log.every": "1"})
    command = ["-m", "megapipe.launch", "--nproc", "2"] if launched else []
    streams = {"stdin": slave, "stdout": slave, "stderr": slave}
    with Job(tmp_path) as job:
        job.start([*command, "train.py", *given], preexec_fn=on_terminal(slave), **streams)
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):
            while b"| loss" not in shown:
                shown += os.read(master, 4096)
        os.close(master)
        outcome = job.end()
    assert outcome.codes == [75], shown
    assert list((tmp_path / "runs/run/checkpoints").glob("step-*/manifest.json"))
    assert '"saved ' in (tmp_path / "runs/run/log.jsonl").read_text()
