"""A rank that hangs is named, the others end in time, and the job can begin again."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.parity.hanging import TIMEOUT_S, Fault, Hang, run_hanging, write_callbacks
from tests.parity.jobs import ENDLESS, ROOT, Job, arguments, tiny
from tests.parity.launches import run_forked

pytestmark = pytest.mark.full
LEAVE_S = 5.0
"""Seconds after the time-out within which all have ended, launchers included."""
SECRET = "canary-of-a-secret"
EARLY_S = 0.5
"""Seconds before the fault in which others may have begun to wait for that rank."""
LATE_S = 1.0
"""Seconds after the time-out within which a monitor notices."""


def assert_noticed_in_time(hang: Hang) -> None:
    """Check when the hang was noticed, by the monitor's own watch and by what its line says."""
    assert hang.noticed is not None
    assert TIMEOUT_S - EARLY_S <= hang.noticed <= TIMEOUT_S + LATE_S
    said = re.search(r", for (\d+) s at ", hang.outcome.errors[0])
    assert said is not None
    assert TIMEOUT_S <= int(said[1]) <= TIMEOUT_S + LATE_S


@pytest.mark.deadline
@pytest.mark.parametrize(
    ("fault", "evidence", "last"),
    [
        pytest.param(
            Fault(1, "stop", action=5),
            "is stopped by a signal",
            "F stage 0 micro-batch 1",
            marks=pytest.mark.slow,
        ),
        (
            Fault(0, "spin", action=7),
            "makes no progress",
            "receive I of stage 1 micro-batch 0 from rank 1",
        ),
        (Fault(3, "lock", hook="before_save"), "something holds Python's lock", ""),
        pytest.param(
            *(Fault(1, "lose", action=3), "its messages do not arrive"),
            "receive I of stage 1 ",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stop", "spin", "lock", "lose"],
)
def test_the_culprit(
    tmp_path: Path, fault: Fault, evidence: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the rank and its place, what is wrong with it, and what it did last."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    hang = run_hanging(tmp_path, 4, fault, **{"parallel.pp": "2", "parallel.tp": "2"})
    hang.outcome.assert_one_line(4, f"the job hangs: rank {fault.rank} (pp ", evidence)
    assert hang.culprit == fault.rank
    assert f" at step 3: {last}" in hang.outcome.errors[0]
    assert_noticed_in_time(hang)
    assert hang.seconds < TIMEOUT_S + LEAVE_S
    (report,) = (tmp_path / "runs/run/hangs").iterdir()
    assert f"{report}" in hang.outcome.errors[0]
    told = {path.name for path in report.iterdir()}
    assert {f"rank-{rank}.{kind}" for rank in range(4) for kind in ("txt", "json")} <= told
    for other in {*range(4)} - {fault.rank}:
        assert "trainer.py" in (report / f"rank-{other}.txt").read_text(), "the main thread's"
        flight = json.loads((report / f"rank-{other}.flight.json").read_text())
        assert any("gloo" in entry["profiling_name"] for entry in flight["entries"])
    assert SECRET not in hang.outcome.text
    assert not [path for path in report.iterdir() if SECRET.encode() in path.read_bytes()]


@pytest.mark.slow
def test_a_launcher_starts_the_job_again(tmp_path: Path) -> None:
    fault = Fault(0, "stop", step=5, action=2)
    ends = {"train.steps": "6", "optimizer.schedule": "cosine", "parallel.pp": "2"}
    hang = run_hanging(tmp_path, 2, fault, "--max-restarts", "1", **ends)
    assert hang.outcome.codes == [0], hang.outcome.text
    assert hang.culprit == 0
    assert "restarting after step 4 (1 of 1), in 1 s" in hang.outcome.text
    assert "resumed from" in hang.outcome.text
    assert (tmp_path / "runs/run/checkpoints/step-00000006").is_dir()


@pytest.mark.slow
def test_without_a_watchdog_communication_notices(tmp_path: Path) -> None:
    fault = Fault(1, "stop", action=5)
    hang = run_hanging(tmp_path, 2, fault, **{"parallel.pp": "2", "parallel.watchdog": "false"})
    hang.outcome.assert_one_line(4, "rank 0 lost contact with a peer")
    assert hang.seconds < TIMEOUT_S + LEAVE_S
    assert not (tmp_path / "runs/run/hangs").exists()


WITH_CALLBACKS = """
import sys
sys.path.insert(0, {root!r})
from megapipe.train.main import main
from tests.parity.launch_with import add_callbacks
add_callbacks({callbacks!r})
sys.exit(main(sys.argv[1:]))
"""


def test_a_killed_rank_whose_connections_stay_open(tmp_path: Path) -> None:
    """Nobody has to wait for the time-out, and torchrun's request to stop does not keep it up."""
    fault = Fault(1, "die", action=3, seconds=15.0)
    given = arguments({**tiny(tmp_path), **ENDLESS, "parallel.tp": "2", "parallel.timeout_s": "60"})
    script = tmp_path / "with_fault.py"
    callbacks = str(write_callbacks(tmp_path, fault))
    script.write_text(WITH_CALLBACKS.format(root=str(ROOT), callbacks=callbacks))
    with Job(tmp_path) as job:
        run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        job.start([*run, str(script), *given])
        outcome = job.end(left_behind_s=15.0)
    outcome.assert_one_line(
        -9, "rank 0 lost contact with rank 1 (", "ended without an error message"
    )
    assert outcome.seconds < 40.0


DIES = """
import os, signal, sys
sys.path.insert(0, {root!r})
from megapipe.train import job
from megapipe.train.main import main
if os.environ["RANK"] == "1":
    job.rendezvous.start_process_group = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main(sys.argv[1:]))
"""


def test_a_rank_that_is_killed_between_the_store_and_the_mesh(tmp_path: Path) -> None:
    """There are no connections yet that could tell, and nobody waits for the time-out."""
    script = tmp_path / "dies.py"
    script.write_text(DIES.format(root=str(ROOT)))
    given = {**tiny(tmp_path), "train.global_batch": "6", "parallel.timeout_s": "60"}
    outcome = run_forked(tmp_path, 3, *arguments(given), script=str(script))
    assert outcome.codes == [4, -signal.SIGKILL, 4]
    (line,) = outcome.errors
    assert "ranks 0, 2 lost contact with rank 1 (process " in line
    assert "whose process ended without an error message" in line
    assert outcome.seconds < 40.0


@pytest.mark.deadline
def test_a_rank_of_another_node(tmp_path: Path) -> None:
    """Monitors of both nodes tell one of them what they see."""
    fault = Fault(3, "stop", action=5)
    hang = run_hanging(tmp_path, 2, fault, nodes=2, **{"parallel.pp": "2", "parallel.tp": "2"})
    hang.outcome.assert_one_line(4, "rank 3 (pp 1, ", "is stopped by a signal", "ranks 0-2 wait")
    assert_noticed_in_time(hang)
    assert hang.seconds < TIMEOUT_S + LEAVE_S
    told = {path.name for path in (tmp_path / "runs/run/hangs").glob("*/*.json")}
    assert {f"rank-{rank}.json" for rank in range(4)} <= told, "of both nodes"


@pytest.mark.slow
def test_a_stopped_rank_that_has_the_store(tmp_path: Path) -> None:
    """Ranks that no launcher has started; the one that is left cannot ask who is to speak."""
    wanted = {"parallel.pp": "2", "parallel.timeout_s": str(TIMEOUT_S)}
    given = arguments({**tiny(tmp_path), **ENDLESS, **wanted})
    with Job(tmp_path) as job:
        job.ranks(2, {0: given, 1: given})
        job.await_text("| loss")
        job.processes[0].send_signal(signal.SIGSTOP)
        began = time.monotonic()
        assert job.processes[1].wait(20) == 4
        assert job.processes[0].wait(20) == -signal.SIGKILL
        assert time.monotonic() - began < TIMEOUT_S + LEAVE_S
        outcome = job.end()
    (line,) = outcome.errors
    assert "the job hangs: rank 0 (pp 0, " in line
    assert "is stopped by a signal" in line
    assert line.endswith("does not answer"), "the store"
