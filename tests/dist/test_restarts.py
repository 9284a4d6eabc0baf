"""A launcher that starts a run again: nothing is lost, and it knows when to stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.parity.jobs import ENDLESS, Job, Outcome, arguments, free_port, tiny
from tests.parity.launch_with import launched_with
from tests.parity.launches import run_forked
from tests.parity.stopped_runs import assert_same_files

pytestmark = pytest.mark.full

FAULT = """
import os, signal, sys
from pathlib import Path
from megapipe.train.callbacks import Callback
class Fault(Callback):
    def before_step(self, run, step):
        mark = Path({folder!r}, f"fault-{{step.number}}")
        if run.mesh.rank == 1 and mark.exists():
            left = int(mark.read_text()) - 1
            mark.write_text(str(left)) if left else mark.unlink()
            {action}
callbacks = [Fault()]
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
WANTED = {"parallel.pp": "2", "model.dropout": "0.1", "checkpoint.every": "2", "train.steps": "8"}


def settings(folder: Path, **given: str) -> list[str]:
    return arguments({**tiny(folder), **WANTED, "checkpoint.keep": "9", **given})


def run(
    folder: Path, faults: dict[int, int], *options: str, action: str = KILL, **given: str
) -> Outcome:
    """Run two ranks; at each of these steps the second has a fault, the given number of times."""
    launch = launched_with(faulty(folder, faults, action), "--nproc", "2", *options)
    with Job(folder, 120) as job:
        job.start([*launch, "train.py", *settings(folder, **given)])
        return job.end()


def faulty(folder: Path, faults: dict[int, int], action: str = KILL) -> Path:
    """Write the callbacks of ranks: the second has a fault at each of these steps, as often as
    given."""
    for step, times in faults.items():
        (folder / f"fault-{step}").write_text(str(times))
    path = folder / "faulty.py"
    path.write_text(FAULT.format(folder=str(folder), action=action))
    return path


def test_two_kills_and_an_exception_change_no_bit(tmp_path: Path) -> None:
    outcome = run(tmp_path, {4: 1, 7: 1}, "--max-restarts", "1")
    assert outcome.codes == [0], outcome.text
    said = [text for text in outcome.text.splitlines() if "restarting" in text]
    assert said == [f"megapipe: restarting after step {step} (1 of 1), in 1 s" for step in (3, 6)]
    assert outcome.text.count("resumed from") == 2
    whole = run_forked(tmp_path, 2, *settings(tmp_path, **{"run.name": "whole"}))
    assert set(whole.codes) == {0}, whole.text
    for step in (2, 4, 6, 8):
        folders = [tmp_path / "runs" / name / "checkpoints" for name in ("run", "whole")]
        assert_same_files(*(folder / f"step-{step:08d}" for folder in folders))


@pytest.mark.slow
def test_a_second_job_leaves_the_first_one_alone(tmp_path: Path) -> None:
    """It is told, and is not started again."""
    given = settings(tmp_path, **ENDLESS, **{"checkpoint.every": "0"})
    launch = ["-m", "megapipe.launch", "--nproc", "2", "--max-restarts", "3", "train.py", *given]
    with Job(tmp_path, 120) as first:
        launcher = first.start(launch)
        first.await_text("| loss")
        (tmp_path / "second").mkdir()
        with Job(tmp_path / "second") as second:
            second.start(launch)
            other = second.end()
        other.assert_one_line(2, "runs/run is in use by process ", "end that job first")
        assert "restarting" not in other.text
        launcher.send_signal(signal.SIGTERM)
        outcome = first.end()
    assert outcome.codes == [75], outcome.text
    (line,) = outcome.errors
    assert "stopped by a signal; saved step " in line


@pytest.mark.slow
def test_two_faults_at_a_step_go_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    """Where they were chance that costs time, and no bit."""
    here = {"checkpoint.async_save": "false"}  # step 4 is saved before step 6 fails
    outcome = run(tmp_path, {6: 2}, "--max-restarts", "3", **here)
    assert outcome.codes == [0], outcome.text
    assert "(2 of 3), in 2 s, from before step 4" in outcome.text
    assert "step-00000004: starts from it, or from before it, failed" in outcome.text
    names = {path.name for path in (tmp_path / "runs/run/checkpoints").iterdir()}
    assert {".failed-step-00000004", "step-00000004", "step-00000004.1"} <= names
    whole = run_forked(tmp_path, 2, *settings(tmp_path, **{**here, "run.name": "whole"}))
    assert set(whole.codes) == {0}, whole.text
    runs = [tmp_path / "runs" / name / "checkpoints" for name in ("run", "whole")]
    assert_same_files(runs[0] / "step-00000004.1", runs[1] / "step-00000004")
    assert_same_files(*(folder / "step-00000008" for folder in runs))


DEADLY = """
import os, signal
from megapipe.train import trainer
load = trainer.load
def deadly(checkpoint, state, mesh, memory=None):
    if mesh.rank == 1 and (checkpoint.path / "poison").exists():
        os.kill(os.getpid(), signal.SIGSEGV)
    load(checkpoint, state, mesh, memory)
trainer.load = deadly
callbacks = []
"""


def test_a_checkpoint_that_kills_whoever_loads_it(tmp_path: Path) -> None:
    """Also where this launcher has not seen the run train."""
    script = tmp_path / "deadly.py"
    script.write_text(DEADLY)
    first = run_forked(tmp_path, 2, *settings(tmp_path, **{"train.stop_after": "6"}))
    assert set(first.codes) == {0}, first.text
    checkpoints = tmp_path / "runs/run/checkpoints"
    (checkpoints / "step-00000006/poison").touch()
    with Job(tmp_path, 120) as job:
        launch = launched_with(script, "--nproc", "2", "--max-restarts", "3")
        job.start([*launch, "train.py", *settings(tmp_path)])
        outcome = job.end()
    assert outcome.codes == [0], outcome.text
    said = [text for text in outcome.text.splitlines() if "restarting" in text]
    words = "megapipe: restarting after a start without a step"
    assert said == [f"{words} (1 of 3), in 1 s", f"{words} (2 of 3), in 2 s, from before step 6"]
    assert f"resumed from {checkpoints / 'step-00000004'} at step 4 of 8" in outcome.text
    assert (checkpoints / "step-00000006.1").is_dir()


@pytest.mark.slow
def test_too_many(tmp_path: Path) -> None:
    outcome = run(tmp_path, {3: 9}, "--max-restarts", "2")
    assert outcome.codes == [8], outcome.text
    assert outcome.errors[-1] == (
        "megapipe: error: 2 starts in a row did not get beyond step 2; the last ended with "
        "exit code 137"
    )


@pytest.mark.slow
def test_what_is_not_started_again(tmp_path: Path) -> None:
    """It may be a mistake, a rank that is killed before it trains, a program that is not a run, or
    a request."""
    launch = ["-m", "megapipe.launch", "--max-restarts", "3", "--nproc", "2"]
    for program, code in (
        (["train.py", *settings(tmp_path), "model.hiden=16"], 2),
        (["-c", "import os; os.kill(os.getpid(), 9)"], 137),
    ):
        with Job(tmp_path) as job:
            job.start([*launch, *program])
            outcome = job.end()
        assert outcome.codes == [code]
        assert "again" not in outcome.text
    endless = {"train.steps": "100000", "optimizer.schedule": "constant", "log.every": "100000"}
    with Job(tmp_path) as job:
        launcher = job.start([*launch, "train.py", *settings(tmp_path, **endless)])
        job.await_text("| loss")
        launcher.send_signal(signal.SIGTERM)
        job.end().assert_one_line(75, "stopped by a signal")


@pytest.mark.slow
def test_two_nodes_start_again_together(tmp_path: Path) -> None:
    """Whichever of them has lost a rank."""
    port = free_port()
    nodes = launched_with(faulty(tmp_path, {4: 1, 7: 1}), "--nnodes", "2", "--nproc", "1")
    nodes += ["--rdzv-id", "a", "--rdzv-endpoint", f"localhost:{port}", "--max-restarts", "1"]
    with Job(tmp_path, 120) as job:
        for number in range(2):
            job.start([*nodes, "train.py", *settings(tmp_path)])
            if number == 0:
                job.await_store(port)
        outcome = job.end()
    assert outcome.codes == [0, 0], outcome.text
    assert outcome.text.count("restarting") == 2, "one node speaks"
