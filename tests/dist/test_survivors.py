"""What is left of a job ends where its store, or whoever hosts that, answers nobody."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megapipe.launch import shutdown
from tests.parity.jobs import ENDLESS, Job, arguments, free_port, tiny

pytestmark = pytest.mark.full
TIMEOUT_S = 3
LEAVE_S = 5.0
"""Seconds that a rank may take to end after ``parallel.timeout_s``."""


def endless(folder: Path) -> list[str]:
    """Return the settings of a job that nobody watches (those that are: test_hangs.py)."""
    wanted = {"parallel.pp": "2", "parallel.timeout_s": str(TIMEOUT_S)}
    wanted["parallel.watchdog"] = "false"
    return arguments({**tiny(folder), **ENDLESS, **wanted})


def assert_ended(job: Job, began: float, *processes: int) -> list[int]:
    """Check that processes end in time; return their exit codes."""
    codes = []
    for number in processes:
        left = began + TIMEOUT_S + LEAVE_S - time.monotonic()
        codes.append(job.processes[number].wait(max(0.1, left)))
    return codes


@pytest.mark.deadline
def test_the_peers_of_a_rank_that_is_stopped_with_the_store(tmp_path: Path) -> None:
    """The failure path of rank 1 would wait for the store for ever."""
    given = endless(tmp_path)
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("| loss")
        job.processes[0].send_signal(signal.SIGSTOP)
        assert assert_ended(job, time.monotonic(), 1) == [4]
        (line,) = [line for line in job.text.splitlines() if "megapipe: error:" in line]
        assert "rank 1 lost" in line
        assert "rendezvous store at 127.0.0.1:" in line
        job.processes[0].send_signal(signal.SIGCONT)
        assert job.processes[0].wait(LEAVE_S + TIMEOUT_S) == 4, "once it goes on"


@pytest.mark.slow
def test_a_stopped_rank_under_our_launcher(tmp_path: Path) -> None:
    """torchrun's agent would give it half a minute to end."""
    with Job(tmp_path) as job:
        job.launch(2, *endless(tmp_path))
        job.await_text("| loss")
        os.kill(job.pids()[0], signal.SIGSTOP)
        began = time.monotonic()
        assert assert_ended(job, began, 0) == [4]
        outcome = job.end()
    outcome.assert_one_line(4, "rank 1 lost contact with a peer")


@pytest.mark.slow
def test_the_nodes_of_a_launcher_that_is_stopped_with_the_store(tmp_path: Path) -> None:
    """Neither ranks nor the other launcher, all of which ask that store, wait for it."""
    nodes = ["-m", "megapipe.launch", "--nnodes", "2", "--nproc", "1", "--rdzv-id", "a"]
    port = free_port()
    nodes += ["--rdzv-endpoint", f"localhost:{port}"]
    with Job(tmp_path) as job:
        for number in range(2):
            job.start([*nodes, "train.py", *endless(tmp_path)])
            if number == 0:
                job.await_store(port)
        job.await_text("| loss")
        job.processes[0].send_signal(signal.SIGSTOP)
        assert assert_ended(job, time.monotonic(), 1) == [4]
        deadline = time.monotonic() + shutdown.GRACE_S
        while len(job.pids()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not job.pids(), "the ranks have ended, that of the stopped launcher too"
        job.processes[0].send_signal(signal.SIGCONT)
        assert job.processes[0].wait(2 * LEAVE_S) == 4
