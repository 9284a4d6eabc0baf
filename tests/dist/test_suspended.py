"""A job that is suspended as a whole, as by `scontrol suspend`, goes on afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from tests.parity.jobs import ENDLESS, Job, arguments, tiny
from tests.parity.launch_with import launched_with

pytestmark = pytest.mark.full
TIMEOUT_S = 2.0
SUSPENDED_S = 6.0
"""Seconds, longer than all time-outs. Those of communication come two seconds later than others."""
CALLBACKS = """
import os, time
from megapipe.train.callbacks import Callback

first = os.environ["RANK"] == "0"

class Late(Callback):
    def before_step(self, run, step):
        time.sleep(0.3 * first)
    def after_step(self, run, step):
        if first:
            print("after step", step.number, flush=True)

callbacks = [Late()]
"""
"""Rank 0 is late at each step, so that the other waits for it at almost any time."""


def start(job: Job, axis: str) -> None:
    callbacks = job.folder / "late.py"
    callbacks.write_text(CALLBACKS)
    wanted = {f"parallel.{axis}": "2", "parallel.timeout_s": str(TIMEOUT_S)}
    given = arguments({**tiny(job.folder), **ENDLESS, **wanted})
    job.start(launched_with(callbacks, "--nproc", "2", "train.py", *given))
    job.await_text("after step 2\n")


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize("axis", ["pp", pytest.param("dp", marks=pytest.mark.slow)])
def test_it_goes_on(tmp_path: Path, axis: str) -> None:
    """Messages and collectives that the job has waited for are no time-outs."""
    with Job(tmp_path) as job:
        start(job, axis)
        pids = list(job.alive())
        assert len(pids) >= 4, "a launcher, two ranks, and the process that watches"
        send(signal.SIGSTOP, pids)
        time.sleep(SUSPENDED_S)
        so_far = len(job.text)
        send(signal.SIGCONT, pids)
        for _ in range(3):
            job.await_text("after step", so_far)
            so_far = len(job.text)
        time.sleep(TIMEOUT_S)  # what the time away would be counted for, if it were
        job.processes[0].send_signal(signal.SIGTERM)
        outcome = job.end()
    assert outcome.codes == [75], outcome.text


@pytest.mark.slow
def test_a_hang_is_found_without_the_process_that_watches(tmp_path: Path) -> None:
    """Communication has no time-out by then that would."""
    with Job(tmp_path) as job:
        start(job, "pp")
        watches = [
            pid
            for pid in job.alive()
            if b"megapipe.watch" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        send(signal.SIGKILL, watches)
        send(signal.SIGSTOP, [job.pids()[0]])
        began = time.monotonic()
        outcome = job.end()
    assert time.monotonic() - began < 30.0
    line = "rank 1 has waited for other ranks for 2 s (parallel.timeout_s), and no monitor says"
    outcome.assert_one_line(4, line)
