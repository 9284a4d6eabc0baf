"""Ctrl-C and what schedulers send, to real processes: the first saves, the second ends at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from jobs import ENDLESS, Job, Outcome, arguments, run_plain, tiny

from megapipe.train.signals import STOP_SIGNALS


def heed_interrupts() -> None:
    """As from a keyboard; what a shell starts in the background ignores them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def endless(folder: Path, **more: str) -> list[str]:
    return arguments({**tiny(folder), **ENDLESS, **more})


def assert_saved(outcome: Outcome, folder: Path) -> None:
    """One line says so, and the checkpoint is there."""
    assert len(outcome.errors) == 1, outcome.text
    assert "stopped by a signal; saved step" in outcome.errors[0]
    assert list((folder / "runs/run/checkpoints").glob("step-*/manifest.json")), outcome.text


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_process_that_is_asked_to_stop_saves_and_goes_on_later(
    number: signal.Signals, tmp_path: Path
) -> None:
    with Job(tmp_path) as job:
        job.start(["train.py", *endless(tmp_path)], preexec_fn=heed_interrupts)
        job.await_text("loss")
        job.processes[0].send_signal(number)
        outcome = job.end()
    assert outcome.codes == [75]
    assert_saved(outcome, tmp_path)
    assert outcome.text.count("Ctrl-C again ends at once") == (number == signal.SIGINT)
    assert outcome.text.count("Traceback") == 0
    if number == signal.SIGINT:
        saved = int(outcome.errors[0].split("saved step ")[1].split()[0])
        again = run_plain(tmp_path, *endless(tmp_path), f"train.stop_after={saved + 1}")
        assert again.codes == [0]
        assert f"at step {saved} of" in again.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_second_signal_ends_a_process_that_waits_for_a_peer(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It is inside a collective, where no handler of Python's runs."""
    given = endless(tmp_path, **{"parallel.pp": "2"})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("loss")
        job.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        job.processes[0].send_signal(number)
        time.sleep(0.5)
        assert job.processes[0].poll() is None
        job.processes[0].send_signal(signal.SIGUSR1)  # asks, and never ends
        time.sleep(0.2)
        job.processes[0].send_signal(number)
        assert job.processes[0].wait(3) == 128 + number


def test_an_interrupt_before_training_ends_at_once(tmp_path: Path) -> None:
    """Here while waiting for a peer that never comes."""
    with Job(tmp_path) as job:
        job.ranks(2, {0: arguments(tiny(tmp_path))})
        deadline = time.monotonic() + 30
        while not heeds_interrupts(job.processes[0].pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(2.0)
        job.processes[0].send_signal(signal.SIGINT)
        assert job.processes[0].wait(3) == 130
        assert "Traceback" not in job.text


def heeds_interrupts(pid: int) -> bool:
    """Whether the process has a handler for SIGUSR1, as it has from the start of a run on."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


@pytest.mark.parametrize("to", ["launcher", "rank"])
def test_an_interrupt_under_torchrun_saves_all(to: str, tmp_path: Path) -> None:
    """Its agent hands the signal on to its ranks and gives them half a minute."""
    with Job(tmp_path) as job:
        job.torchrun(2, *endless(tmp_path, **{"parallel.pp": "2"}))
        job.await_text("loss")
        os.kill(job.processes[0].pid if to == "launcher" else job.pids()[1], signal.SIGINT)
        outcome = job.end()
    assert_saved(outcome, tmp_path)
    assert outcome.codes == ([75] if to == "rank" else [1])
