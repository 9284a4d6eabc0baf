"""scripts/slurm/train.sbatch on a real SLURM: two nodes of two processes each."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import held
from tests.cluster.slurm import SCRIPT, Cluster, SlurmJob
from tests.parity.jobs import ROOT, arguments, tiny
from tests.parity.stand_ins import write_interpreter
from tests.parity.stopped_runs import assert_same_files
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full
STEPS, EVERY = 9, 3
TIMEOUT_S = 10
STOPPED = held.STEP + 1
"""A step asks for a stop before it is held."""
SETTINGS = {
    "optimizer.schedule": "held:rate",
    "model.dropout": "0.1",
    "parallel.pp": "2",
    "train.steps": str(STEPS),
    "checkpoint.every": str(EVERY),
    "checkpoint.keep": "9",
    "log.every": "1",
}
HELD = [f"held.{rank}" for rank in range(4)]
Submit = Callable[..., SlurmJob]


def project(folder: Path, *, hold: bool = False) -> Path:
    """Make a folder from which jobs can be submitted."""
    folder.mkdir(exist_ok=True)
    write_interpreter(folder)
    (folder / "train.py").symlink_to(ROOT / "train.py")
    shutil.copy(Path(held.__file__), folder)
    if hold:
        (folder / "hold").touch()
    return folder


def submit(cluster: Cluster, folder: Path, *words: str, options: tuple[str, ...] = ()) -> SlurmJob:
    """Submit a job of the run in the folder; later words override the settings of all jobs."""
    given = arguments({**tiny(folder), **SETTINGS})
    return cluster.submit(folder, "--gpus-per-node=2", *options, SCRIPT, *given, *words)


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Submit:
    """Begin a job whose ranks are all in the step where they are held."""

    def begin(*options: str) -> SlurmJob:
        job = submit(cluster, project(tmp_path, hold=True), options=options)
        job.await_files(*HELD)
        return job

    return begin


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmJob:
    """Return a job that has run to its end without a disturbance."""
    job = submit(cluster, project(tmp_path_factory.mktemp("whole")))
    job.await_end()
    return job


def steps(job: SlurmJob) -> list[tuple[int, float, float]]:
    """Return each step that the job's run has logged, with its loss and gradient norm."""
    records = map(json.loads, (job.run / "log.jsonl").read_text().splitlines())
    return [(x["step"], x["loss"], x["grad_norm"]) for x in records if "grad_norm" in x]


def saved(job: SlurmJob) -> list[int]:
    """Return the steps of the job's checkpoints."""
    found = (job.run / "checkpoints").glob("step-*")
    return sorted(int(path.name.removeprefix("step-")) for path in found)


def assert_goes_on(job: SlurmJob, whole: SlurmJob) -> None:
    """Queued again, it ends as the job that is left alone, and has taken no step twice."""
    job.await_requeue(1)
    assert saved(job) == [EVERY, STOPPED], job.log
    (job.folder / "hold").unlink()
    job.begin_now()
    assert_ends_as(job, whole, restarts=1)
    assert f"at step {STOPPED} of {STEPS}" in job.log
    assert steps(job) == steps(whole)


def assert_ends_as(job: SlurmJob, whole: SlurmJob, restarts: int) -> None:
    """It ends well, with the weights of the job that is left alone."""
    job.await_end(restarts)
    assert job.end == ("COMPLETED", "0:0", str(restarts)), job.log
    assert_same_files(*(each.run / f"checkpoints/step-{STEPS:08d}" for each in (job, whole)))


def test_a_job(whole: SlurmJob) -> None:
    assert whole.end == ("COMPLETED", "0:0", "0"), whole.log
    assert "pp 2 x dp 2 x cp 1 x tp 1, 4 processes" in whole.log
    assert saved(whole) == list(range(EVERY, STEPS + 1, EVERY))
    assert [step for step, *_ in steps(whole)] == list(range(1, STEPS + 1))
    assert {path.name for path in whole.folder.glob("megapipe-*")} == {
        f"megapipe-{whole.number}.log"
    }


def test_mistakes(cluster: Cluster, tmp_path: Path) -> None:
    """Each node has its own launcher, and they end in any order."""
    folder = project(tmp_path)
    line = "megapipe: error: command line: train.lr=3: unknown key; did you mean optimizer.lr?"
    for job in [submit(cluster, folder, "train.lr=3") for _ in range(3)]:
        job.await_end()
        assert job.end == ("FAILED", "2:0", "0"), job.log
        assert line in job.log.splitlines()
        assert "Traceback" not in job.log


def test_another_folder(cluster: Cluster, tmp_path: Path) -> None:
    """One that is not the root of the repository."""
    job = submit(cluster, tmp_path)
    job.await_end()
    assert job.end == ("FAILED", "2:0", "0"), job.log
    assert job.log == (
        f"megapipe: error: {tmp_path} has no train.py, or no .venv/bin/python: submit from the "
        "root of the repository\n"
    )


def test_an_array(cluster: Cluster, tmp_path: Path, whole: SlurmJob) -> None:
    """Each task has a run of its own."""
    array = submit(cluster, project(tmp_path), "run.name=run-%a", options=("--array=0-1",))
    for task in ("0", "1"):
        job = SlurmJob(cluster, f"{array.number}_{task}", tmp_path, f"run-{task}")
        assert_ends_as(job, whole, restarts=0)
        assert steps(job) == steps(whole)
        assert f"name: run-{task}\n" in (job.run / "config.yaml").read_text()


@in_parts("options", [["--batch"], [], ["--full"]], full=[[]], ids=str)
def test_a_notice(options: list[str], start: Submit, whole: SlurmJob) -> None:
    """The signal goes to the script, as of a time limit, to the launchers, or to all processes."""
    job = start()
    job.cancel("--signal=USR1", *options)
    assert_goes_on(job, whole)


@pytest.mark.slow
def test_a_time_limit(start: Submit, whole: SlurmJob) -> None:
    """SLURM gives notice up to a minute earlier than it is asked to."""
    assert_goes_on(start("--time=3", "--signal=B:USR1@60"), whole)


@pytest.mark.parametrize("partition", ["patient", "hasty"])
def test_a_preemption(partition: str, cluster: Cluster, start: Submit, whole: SlurmJob) -> None:
    job = start(f"--partition={partition}")
    nodes = ",".join(host.name for host in job.nodes)
    wanted = ("--partition=urgent", f"--nodelist={nodes}", "--exclusive", "--output=/dev/null")
    urgent = cluster.submit(job.folder, *wanted, "--wrap=true")
    assert_goes_on(job, whole)
    assert urgent.end == ("COMPLETED", "0:0", "0")


@pytest.mark.slow
def test_a_suspended_job(cluster: Cluster, tmp_path: Path, whole: SlurmJob) -> None:
    """The suspension is longer than all time-outs, with ranks that wait for the one that is
    held."""
    job = submit(cluster, project(tmp_path, hold=True), f"parallel.timeout_s={TIMEOUT_S}")
    job.await_files(*HELD)
    job.suspend(3 * TIMEOUT_S)
    (job.folder / "hold").unlink()
    assert_ends_as(job, whole, restarts=0)


def test_a_job_that_is_cancelled(start: Submit) -> None:
    job = start()
    job.cancel()
    job.await_end()
    assert job.end[::2] == ("CANCELLED", "0")
    assert saved(job) == [EVERY, STOPPED], job.log


def test_a_killed_rank(start: Submit, whole: SlurmJob) -> None:
    """The launchers start the run again within the job."""
    job = start()
    for pid in job.nodes[1].pids("rank 3"):
        os.kill(pid, signal.SIGKILL)
    (job.folder / "hold").unlink()
    assert_ends_as(job, whole, restarts=0)
    assert job.log.count("restarting after step") == 1


@in_parts("which", [0, 1], full=[1], ids=["of the script", "of a launcher"])
def test_a_crashed_node(which: int, cluster: Cluster, start: Submit, whole: SlurmJob) -> None:
    """SLURM queues the job again when it finds that the node is lost."""
    job = start()
    crashed = job.nodes[which]
    crashed.end()
    (job.folder / "hold").unlink()
    job.await_requeue(1)
    assert not list(job.folder.glob("*.faults"))
    cluster.boot(crashed.name)
    job.begin_now()
    assert_ends_as(job, whole, restarts=1)


@in_parts("before", [0, 2], full=[2])
def test_faults(before: int, cluster: Cluster, tmp_path: Path) -> None:
    """After the third of its life the job is queued again, and after the fourth it is not."""
    folder = project(tmp_path)
    (folder / "train.py").unlink()
    (folder / "train.py").write_text("import os; os.kill(os.getpid(), 9)")
    job = submit(cluster, folder, options=("--hold",))
    faults = folder / f"megapipe-{job.number}.faults"
    faults.write_text("137\n" * before)
    job.release()
    for restarts in range(1, 4 - before):
        job.await_requeue(restarts)
        assert faults.read_text() == "137\n" * (before + restarts), job.log
        job.begin_now()
    job.await_end(3 - before)
    assert job.end == ("FAILED", "137:0", str(3 - before)), job.log
    assert {path.name for path in folder.glob("megapipe-*")} == {f"megapipe-{job.number}.log"}
