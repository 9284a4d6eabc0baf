"""scripts/slurm/train.sbatch, run for real against stand-ins for srun and scontrol."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.dist.stand_ins import write_program
from tests.parity.marks import in_parts

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
if [[ $1 == show ]]; then
  printf 'localhost\\ngpu08\\n'
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
    """A submit folder with stand-ins for SLURM, and for train.py one that runs for 30 s."""
    folder = tmp_path / "project"
    (folder / ".venv/bin").mkdir(parents=True)
    write_program(
        folder / ".venv/bin/python",
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n',
    )
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
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "64",
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def submit(*arguments):
    script = str(ROOT / "scripts/slurm/train.sbatch")
    return subprocess.Popen(["bash", script, *arguments], cwd="/")


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
        *("--nnodes", "1", "--nproc", "1", "--restarts", "3"),
        *("--rdzv-id", "4711.0", "--rdzv-endpoint", "localhost:24711"),
        *("train.py", "configs/llama_8b.yaml", "data.source=a b"),
    ]
    assert not (cluster / "scontrol.log").exists()


def test_sbatch_passes_a_mistake_on_and_does_not_requeue(cluster):
    (cluster / "train.py").write_text(RANK.format(seconds=0, code=2))
    assert submit("configs/llama_8b.yaml").wait(timeout=60) == 2
    assert not (cluster / "scontrol.log").exists()


@in_parts("before", [0, 3], full=2)
def test_after_a_fault_the_job_is_requeued_some_times(cluster, monkeypatch, before):
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(before))
    (cluster / "train.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert submit("configs/llama_8b.yaml").wait(timeout=60) == 137
    assert (cluster / "scontrol.log").exists() == (before < 3)


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


def test_a_preempted_job_saves_and_leaves_the_requeueing_to_slurm(cluster):
    job = submit("configs/llama_8b.yaml")
    wait_for(cluster / "ready")
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == 75
    assert (cluster / "saved").exists()
    assert not (cluster / "scontrol.log").exists()
