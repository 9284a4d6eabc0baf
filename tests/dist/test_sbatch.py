"""scripts/slurm/train.sbatch, run for real against stand-ins for srun and scontrol."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.parity.stand_ins import write_interpreter, write_program
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]

SRUN = """#!/usr/bin/env bash
# Starts what follows the options as one task. A signal goes to all of its process group, as with
# some of SLURM's process trackers; with others only the task itself gets it.
printf '%s\\0' "$@" >"$SRUN_LOG"
while [[ $1 == --* ]]; do
  case $1 in --*=*) shift ;; *) shift 2 ;; esac
done
setsid "$@" &
task=$!
trap 'kill -USR1 -- -$task' USR1
trap 'kill -TERM -- -$task' TERM
wait $task; code=$?
while kill -0 $task 2>/dev/null; do wait $task; code=$?; done
exit $code
"""

SCONTROL = """#!/usr/bin/env bash
if [[ "$1 $2" == "show hostnames" ]]; then
  printf 'localhost\\ngpu08\\n'
elif [[ $1 == show ]]; then
  echo "   JobState=${JOB_STATE:-RUNNING} Reason=None"
else
  echo "$@" >"$SCONTROL_LOG"
fi
"""

RANK = """
import os, pathlib, signal, sys, time
stopped = []
signal.signal(signal.SIGUSR1, lambda *_: stopped.append(1))
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
time.sleep(1)  # as imports do, while the launcher learns of its ranks
pathlib.Path("ready").touch()
for _ in range({seconds} * 100):
    time.sleep(0.01)
    if stopped:
        time.sleep(0.3)  # longer than a signal needs to get everywhere
        pathlib.Path("saved").touch()
        sys.exit(75)
sys.exit({code})
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Make a submit folder with stand-ins for SLURM, and for train.py one that runs for 30 s."""
    folder = tmp_path / "project"
    write_interpreter(folder)
    (folder / "train.py").write_text(RANK.format(seconds=30, code=0))
    binaries = tmp_path / "bin"
    binaries.mkdir()
    write_program(binaries / "srun", SRUN)
    write_program(binaries / "scontrol", SCONTROL)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")
    for name, value in {
        "SRUN_LOG": str(folder / "srun.log"),
        "SCONTROL_LOG": str(folder / "scontrol.log"),
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "megapipe",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "64",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def submit(*arguments, **options):
    script = str(ROOT / "scripts/slurm/train.sbatch")
    return subprocess.Popen(["bash", script, *arguments], cwd="/", **options)


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.01)


def test_sbatch_starts_a_launcher_per_node(cluster):
    (cluster / "train.py").write_text(RANK.format(seconds=0, code=0))
    assert submit("configs/llama_8b.yaml", "data.source=a b").wait(timeout=60) == 0
    arguments = (cluster / "srun.log").read_text().split("\0")[:-1]
    assert arguments == [
        *("--cpus-per-task", "64", "--kill-on-bad-exit=1"),
        *(".venv/bin/python", "-m", "megapipe.launch"),
        *("--nnodes", "1", "--nproc", "1", "--max-restarts", "3"),
        *("--rdzv-id", "4711.0", "--rdzv-endpoint", "localhost:24711"),
        *("--verdict", "megapipe-4711.verdict"),
        *("train.py", "configs/llama_8b.yaml", "data.source=a b"),
    ]
    assert not (cluster / "scontrol.log").exists()
    assert not list(cluster.glob("megapipe-*"))


@pytest.mark.parametrize("missing", ["train.py", ".venv/bin/python"])
def test_sbatch_from_another_folder_is_one_line(cluster, missing):
    (cluster / missing).unlink()
    job = submit("configs/llama_8b.yaml", stderr=subprocess.PIPE, text=True)
    assert job.communicate(timeout=60)[1] == (
        f"megapipe: error: {cluster} has no train.py, or no .venv/bin/python: submit from the root "
        "of the repository\n"
    )
    assert job.returncode == 2
    assert not (cluster / "srun.log").exists()


@pytest.mark.parametrize("given", ["2", "a100:2"])
def test_sbatch_starts_as_many_processes_as_gpus_were_asked_for(cluster, monkeypatch, given):
    """A node that is the job's alone has more."""
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", given)
    (cluster / "train.py").write_text("")
    assert submit("configs/llama_8b.yaml").wait(timeout=60) == 0
    arguments = (cluster / "srun.log").read_text().split("\0")
    assert arguments[arguments.index("--nproc") + 1] == "2"


def test_sbatch_takes_the_code_of_the_first_launcher_to_end(cluster):
    """Not that of srun: the largest of all, where it has ended the others."""
    (cluster / "train.py").write_text(RANK.format(seconds=0, code=2))
    srun = cluster.parent / "bin/srun"
    write_program(srun, SRUN.replace("exit $code", "exit 143"))
    assert submit("configs/llama_8b.yaml").wait(timeout=60) == 2
    assert not (cluster / "scontrol.log").exists()


def test_sbatch_passes_a_mistake_on_and_does_not_requeue(cluster):
    (cluster / "train.py").write_text(RANK.format(seconds=0, code=2))
    assert submit("configs/llama_8b.yaml").wait(timeout=60) == 2
    assert not (cluster / "scontrol.log").exists()


@in_parts("before", [2, 3], full=2)
def test_after_a_fault_the_job_is_requeued_some_times(cluster, monkeypatch, before):
    """However often its time was over, or it was preempted."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "9")
    (cluster / "megapipe-4711.faults").write_text("137\n" * before)
    (cluster / "train.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert submit("configs/llama_8b.yaml").wait(timeout=60) == 137
    assert (cluster / "scontrol.log").exists() == (before < 3)
    assert (cluster / "megapipe-4711.faults").exists() == (before < 3)


def test_ahead_of_the_time_limit_the_ranks_save_and_the_job_is_requeued(cluster):
    job = submit("configs/llama_8b.yaml")
    wait_for(cluster / "ready")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == 75
    assert (cluster / "saved").exists()
    assert (cluster / "scontrol.log").read_text() == "requeue 4711\n"


@in_parts(("code", "requeued"), [(4, ["requeue 4711\n"]), (0, [])], full=2)
def test_what_comes_of_a_job_that_does_not_end_by_the_signal(cluster, code, requeued):
    """A fault while it saves, or its own end."""
    rank = RANK.format(seconds=30, code=0)
    (cluster / "train.py").write_text(rank.replace("sys.exit(75)", f"sys.exit({code})"))
    job = submit("configs/llama_8b.yaml")
    wait_for(cluster / "ready")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(timeout=60) == code
    assert [path.read_text() for path in cluster.glob("scontrol.log")] == requeued


@pytest.mark.parametrize(("state", "requeued"), [("RUNNING", True), ("COMPLETING", False)])
def test_a_job_that_is_preempted_saves_and_is_requeued_once(cluster, monkeypatch, state, requeued):
    """A job that SLURM itself ends (COMPLETING) is requeued by SLURM, which does it too if that is
    cancelled."""
    monkeypatch.setenv("JOB_STATE", state)
    job = submit("configs/llama_8b.yaml")
    wait_for(cluster / "ready")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 75
    assert (cluster / "saved").exists()
    assert (cluster / "scontrol.log").exists() == requeued
