"""Jobs that go on with other numbers of nodes: launchers on one machine stand for the nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megapipe.launch.endpoints import Endpoint
from megapipe.observe.sample_log import check, read_samples
from tests.parity.jobs import Job, Outcome, arguments, free_port, tiny
from tests.parity.launch_with import launched_with
from tests.parity.launches import run_forked
from tests.parity.naive_reader import read_global

pytestmark = pytest.mark.full

SLOW = """
import time
from pathlib import Path
from megapipe.train.callbacks import Callback
class Slow(Callback):
    def before_step(self, run, step):
        if not Path({folder!r}, "go on").exists():
            time.sleep(0.3 if step.number < 20 else 3.0)
callbacks = [Slow()]
"""
STEPS = 100


class Nodes:
    """Launchers of one job; `given` are settings of the run."""

    def __init__(self, job: Job, nodes: str, last_call_s: int, **given: str) -> None:
        self.job = job
        self.folder = job.folder
        slow = self.folder / "slow.py"
        slow.write_text(SLOW.format(folder=str(self.folder)))
        wanted = {"train.steps": str(STEPS), "checkpoint.every": "10", "log.sample_ids": "true"}
        wanted |= {"model.dtype": "fp64", "checkpoint.keep": "99", "train.global_batch": "6"}
        self.settings = arguments({**tiny(self.folder), **wanted, **given})
        self.endpoint = Endpoint("localhost", free_port())
        launch = launched_with(slow, "--nproc", "1", "--nnodes", nodes, "--rdzv-id", "a")
        launch += ["--rdzv-endpoint", str(self.endpoint), "--rdzv-last-call", str(last_call_s)]
        self.command = [*launch, "train.py", *self.settings]

    def start(self) -> subprocess.Popen[bytes]:
        return self.job.start(self.command)

    def await_store(self) -> None:
        self.job.await_store(self.endpoint.port)

    def lose(self, node: subprocess.Popen[bytes]) -> int:
        """Kill a node, its launcher and its rank; return how much was said by then."""
        own = [pid for pid in self.job.alive() if parent(pid) == node.pid]
        for pid in (node.pid, *own):
            os.kill(pid, signal.SIGKILL)
        node.wait()
        return len(self.job.text)

    def go_on(self) -> None:
        """Let steps take no more time than they need."""
        (self.folder / "go on").touch()


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def meshes(outcome: Outcome) -> list[str]:
    """Return the layout of each start, as its banner shows it."""
    return re.findall(r"\| (pp \d+ x dp \d+) x cp 1", outcome.text)


def assert_as_if_whole(folder: Path, settings: Sequence[str]) -> None:
    """Check that the run took each sample once, and ended with the weights of one that never
    stopped."""
    logged = read_samples(folder / "runs/run")
    assert check(logged)[0].endswith("each once and in order")
    whole = run_forked(
        folder, 1, *settings, "run.name=whole", "parallel.pp=1", "checkpoint.in_memory_every=0"
    )
    assert set(whole.codes) == {0}, whole.text
    taken = read_samples(folder / "runs/whole").steps
    assert {k: {*v} for k, v in logged.steps.items()} == {k: {*v} for k, v in taken.items()}
    name = f"checkpoints/step-{STEPS:08d}"
    ours, theirs = (read_global(folder / "runs" / run / name) for run in ("run", "whole"))
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        if expected.dtype == "fp64":
            values = [tensor.bits.view(np.float64) for tensor in (ours[key], expected)]
            np.testing.assert_allclose(*values, rtol=1e-9, atol=1e-12, err_msg=key)
        else:
            np.testing.assert_array_equal(ours[key].bits, expected.bits, err_msg=key)


def test_a_node_goes_and_another_comes(tmp_path: Path) -> None:
    with Job(tmp_path, 150) as job:
        nodes = Nodes(job, "1:2", 6)
        nodes.start()
        lost = nodes.start()
        job.await_text("step  12/")
        at = nodes.lose(lost)
        job.await_text("restarting", at)
        job.await_text("resumed from", at)
        nodes.start()
        job.await_text("with the remaining nodes")
        nodes.go_on()
        outcome = job.end()
    assert outcome.codes == [0, -signal.SIGKILL, 0], outcome.text
    assert meshes(outcome) == ["pp 1 x dp 2", "pp 1 x dp 1", "pp 1 x dp 2"]
    assert "1 node of 1:2 run the job already" in outcome.text
    assert "stopped by the launcher, as nodes have come; saved step" in outcome.text
    assert_as_if_whole(tmp_path, nodes.settings)


@pytest.mark.slow
def test_the_loss_of_the_node_where_all_meet(tmp_path: Path) -> None:
    """It hosts the stores, and has rank 0. The layout is another then."""
    given = {"parallel.pp": "2", "parallel.elastic_layouts.one.pp": "1"}
    with Job(tmp_path, 120) as job:
        nodes = Nodes(job, "1:2", 12, **given)
        first = nodes.start()
        nodes.await_store()
        nodes.start()
        job.await_text("step  12/")
        nodes.lose(first)
        nodes.go_on()
        outcome = job.end()
    assert outcome.codes == [-signal.SIGKILL, 0], outcome.text
    assert meshes(outcome) == ["pp 2 x dp 1", "pp 1 x dp 1"]
    assert_as_if_whole(tmp_path, nodes.settings)


@pytest.mark.slow
def test_a_lost_node_costs_the_steps_since_the_last_copy_in_memory(tmp_path: Path) -> None:
    """The one that is left has its own copy and that of the lost node; no checkpoint is there."""
    given = {"checkpoint.every": "0", "checkpoint.in_memory_every": "2"}
    with Job(tmp_path, 120) as job:
        nodes = Nodes(job, "1:2", 6, **given)
        nodes.start()
        lost = nodes.start()
        job.await_text("step  12/")
        at = nodes.lose(lost)
        nodes.go_on()
        outcome = job.end()
    assert outcome.codes == [0, -signal.SIGKILL], outcome.text
    (step,) = re.findall(
        r"resumed from the in-memory checkpoint \S+ at step (\d+)", outcome.text[at:]
    )
    assert int(step) >= 10
    assert_as_if_whole(tmp_path, nodes.settings)


@pytest.mark.slow
def test_a_node_that_is_asked_to_stop_leaves(tmp_path: Path) -> None:
    """The others go on, and no step is lost."""
    with Job(tmp_path, 120) as job:
        nodes = Nodes(job, "1:3", 6)
        started = [nodes.start() for _ in range(3)]
        job.await_text("| loss")
        started[1].send_signal(signal.SIGTERM)
        job.await_text("with the remaining nodes")
        nodes.go_on()
        outcome = job.end()
    assert outcome.codes == [0, 75, 0], outcome.text
    assert meshes(outcome) == ["pp 1 x dp 3", "pp 1 x dp 2"]
    assert_as_if_whole(tmp_path, nodes.settings)


@pytest.mark.slow
def test_a_job_of_a_fixed_number_of_nodes_ends(tmp_path: Path) -> None:
    with Job(tmp_path) as job:
        nodes = Nodes(job, "2", 6)
        started = [nodes.start() for _ in range(2)]
        job.await_text("| loss")
        started[1].send_signal(signal.SIGTERM)
        job.end().assert_one_line(75, "stopped by a signal; saved step")
