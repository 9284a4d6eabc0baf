"""Ctrl-C and what schedulers send, to real processes: the first saves, the second ends at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from megapipe.launch.signals import AGAIN_S
from tests.parity.jobs import ENDLESS, Job, Outcome, arguments, run_plain, tiny

pytestmark = pytest.mark.full


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


def test_a_process_that_is_interrupted_saves_and_goes_on_later(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        job.start(["train.py", *endless(tmp_path)], preexec_fn=heed_interrupts)
        job.await_text("loss")
        job.processes[0].send_signal(signal.SIGINT)
        outcome = job.end()
    assert outcome.codes == [75]
    assert_saved(outcome, tmp_path)
    assert outcome.text.count("Ctrl-C again ends at once") == 1
    assert "Traceback" not in outcome.text
    saved = int(outcome.errors[0].split("saved step ")[1].split()[0])
    again = run_plain(tmp_path, *endless(tmp_path), f"train.stop_after={saved + 1}")
    assert again.codes == [0]
    assert f"at step {saved} of" in again.text


def test_a_second_interrupt_ends_a_process_that_waits_for_a_peer(tmp_path: Path) -> None:
    """It is inside a collective, where no handler of Python's runs."""
    given = endless(tmp_path, **{"parallel.pp": "2"})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("loss")
        job.processes[1].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        for _ in range(2):  # from the terminal, and handed on by a launcher
            job.processes[0].send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert job.processes[0].poll() is None
        job.processes[0].send_signal(signal.SIGUSR1)  # asks, and never ends
        time.sleep(AGAIN_S)
        job.processes[0].send_signal(signal.SIGINT)
        assert job.processes[0].wait(3) == 130


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


def test_an_interrupt_under_torchrun_saves_all(tmp_path: Path) -> None:
    """Its agent hands the signal on to its ranks and gives them half a minute."""
    with Job(tmp_path) as job:
        job.torchrun(2, *endless(tmp_path, **{"parallel.pp": "2"}))
        job.await_text("loss")
        job.processes[0].send_signal(signal.SIGINT)
        outcome = job.end()
    assert_saved(outcome, tmp_path)


@pytest.mark.parametrize(
    ("to", "number"), [("launcher", signal.SIGINT), ("rank", signal.SIGTERM)], ids=str
)
def test_a_signal_under_our_launcher_saves_all(
    to: str, number: signal.Signals, tmp_path: Path
) -> None:
    with Job(tmp_path) as job:
        job.launch(2, *endless(tmp_path, **{"parallel.pp": "2"}))
        job.await_text("loss")
        os.kill(job.processes[0].pid if to == "launcher" else job.pids()[1], number)
        outcome = job.end()
    assert_saved(outcome, tmp_path)
    assert outcome.codes == [75]
    assert outcome.text.splitlines()[-1] == outcome.errors[0]


@pytest.mark.parametrize("stopped", [(1,), (0, 1)], ids=str)
def test_a_second_interrupt_of_our_launcher_ends_at_once(
    stopped: tuple[int, ...], tmp_path: Path
) -> None:
    """Here where one rank heeds no signal and the other waits for it, or none does."""
    with Job(tmp_path) as job:
        job.launch(2, *endless(tmp_path, **{"parallel.pp": "2"}))
        job.await_text("loss")
        pids = job.pids()
        for rank in stopped:
            os.kill(pids[rank], signal.SIGSTOP)
        for _ in range(2):
            time.sleep(AGAIN_S + 0.2)
            assert job.processes[0].poll() is None
            job.processes[0].send_signal(signal.SIGINT)
        assert job.processes[0].wait(10) == 130
        outcome = job.end()
    assert outcome.errors == []
