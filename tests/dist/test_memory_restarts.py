"""Launchers whose ranks are killed, and that start them again from copies in memory."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from subprocess import Popen

import pytest

from megapipe.checkpoint.folders import committed
from megapipe.launch.memory_folder import ENVIRONMENT, OWNER, PREFIX
from megapipe.launch.memory_folder import ROOT as MEMORY_ROOT
from tests.parity.jobs import ENDLESS, Job, Outcome, arguments, free_port, tiny
from tests.parity.launch_with import launched_with
from tests.parity.launches import run_forked
from tests.parity.stopped_runs import assert_same_files

pytestmark = pytest.mark.full

FAULTS = """
import os, shutil, signal
from pathlib import Path
here = Path({folder!r})
lost = here / ("lost-" + os.environ.get("TEST_NODE", ""))
if lost.exists() and os.environ["LOCAL_RANK"] == "0":
    lost.unlink()
    shutil.rmtree(os.environ["{memory}"])
from megapipe.train.callbacks import Callback
class Fault(Callback):
    def before_step(self, run, step):
        mark = here / f"kill-{{step.number}}-{{run.mesh.rank}}"
        if mark.exists():
            mark.unlink()
            for path in here.glob("lose-*"):
                path.rename(here / path.name.replace("lose", "lost"))
            os.kill(os.getpid(), signal.SIGKILL)
callbacks = [Fault()]
"""
MEMORY = {
    "checkpoint.in_memory_every": "2",
    "checkpoint.every": "0",
    "checkpoint.every_minutes": "0",
}
WANTED = {**MEMORY, "train.steps": "9", "train.global_batch": "6", "model.dropout": "0.1"}
LAYOUTS = {
    "tp2 dp2": (4, {"parallel.tp": "2", "parallel.dp": "2", "model.dropout": "0"}),
    "pp2 dp2 zero 3": (4, {"parallel.pp": "2", "parallel.dp": "2", "optimizer.zero": "3"}),
    "dp3 in the background": (3, {"parallel.dp": "3", "checkpoint.async_save": "true"}),
}


def faults(folder: Path, kills: Mapping[int, int]) -> Path:
    """Write callbacks by which these ranks are killed before these steps, each once."""
    path = folder / "faults.py"
    path.write_text(FAULTS.format(folder=str(folder), memory=ENVIRONMENT))
    for step, rank in kills.items():
        (folder / f"kill-{step}-{rank}").touch()
    return path


def losses(folder: Path, name: str) -> dict[int, float]:
    """Return the loss of each step, as it was logged last."""
    lines = (folder / "runs" / name / "log.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return {each["step"]: each["loss"] for each in records if each["kind"] == "step"}


def assert_as_whole(folder: Path, world: int, settings: Mapping[str, str]) -> None:
    """Check that the run equals, to the bit, the one that nobody has killed, and has one
    checkpoint."""
    whole = {**settings, "run.name": "whole", "checkpoint.in_memory_every": "0"}
    outcome = run_forked(folder, world, *arguments(whole))
    assert set(outcome.codes) == {0}, outcome.text
    assert losses(folder, "run") == losses(folder, "whole")
    folders = [folder / "runs" / name / "checkpoints" for name in ("run", "whole")]
    assert_same_files(*(path / "step-00000009" for path in folders))
    assert [key.name for key in committed(folders[0])] == ["step-00000009"]


def resumed(outcome: Outcome) -> list[int]:
    """Return the steps from which starts went on from memory."""
    found = re.findall(r"resumed from the in-memory checkpoint (/\S+) at step (\d+)", outcome.text)
    assert len(found) == outcome.text.count("resumed from"), outcome.text
    for path, _ in found:
        assert not Path(path).parent.exists(), "it is removed when the job ends"
    return [int(step) for _, step in found]


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[] if name == "tp2 dp2" else pytest.mark.slow) for name in LAYOUTS],
)
def test_a_kill_costs_no_more_steps_than_lie_between_copies(layout: str, tmp_path: Path) -> None:
    """Rank 0 too, and twice; nothing is on the disk."""
    world, given = LAYOUTS[layout]
    settings = {**tiny(tmp_path), **WANTED, **given}
    kills = {4: world - 1, 7: 0}
    launch = ["--nproc", str(world), "--max-restarts", "1", "train.py", *arguments(settings)]
    with Job(tmp_path, 120) as job:
        job.start(launched_with(faults(tmp_path, kills), *launch))
        outcome = job.end()
    assert outcome.codes == [0], outcome.text
    assert resumed(outcome) == [2, 6]
    assert_as_whole(tmp_path, world, settings)


@pytest.mark.slow
def test_a_node_loses_its_memory_between_starts(tmp_path: Path) -> None:
    settings = {**tiny(tmp_path), **WANTED, "parallel.dp": "2"}
    (tmp_path / "lose-node1").touch()
    port = free_port()
    nodes = ["--nnodes", "2", "--nproc", "1", "--rdzv-id", "a", "--max-restarts", "1"]
    nodes += ["--rdzv-endpoint", f"localhost:{port}", "train.py", *arguments(settings)]
    command = launched_with(faults(tmp_path, {6: 1}), *nodes)
    with Job(tmp_path, 120) as job:
        for number in range(2):
            job.start(command, {"TEST_NODE": f"node{number}"})
            if number == 0:
                job.await_store(port)
        outcome = job.end()
    assert outcome.codes == [0, 0], outcome.text
    assert not (tmp_path / "lost-node1").exists(), "it was done"
    assert resumed(outcome) == [4]
    assert_as_whole(tmp_path, 2, settings)


def memory_of(launcher: Popen[bytes]) -> Path:
    """Return the folder of a launcher that has started ranks."""
    for owner in MEMORY_ROOT.glob(f"{PREFIX}*/{OWNER}"):
        if json.loads(owner.read_text())["process"] == launcher.pid:
            return owner.parent
    raise AssertionError("the launcher has made no folder")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_the_folder_goes_with_the_launcher(number: signal.Signals, tmp_path: Path) -> None:
    """One that is told to stop."""
    settings = {**tiny(tmp_path), **ENDLESS, **MEMORY}
    with Job(tmp_path) as job:
        launch = ["-m", "megapipe.launch", "--max-restarts", "2", "train.py"]
        launcher = job.start([*launch, *arguments(settings)])
        job.await_text("in-memory checkpoint of step")
        memory = memory_of(launcher)
        assert any(memory.glob("step-*"))
        assert memory.stat().st_mode & 0o777 == 0o700
        launcher.send_signal(number)
        assert job.end().codes == [75]
        assert not memory.exists()


@pytest.mark.slow
def test_the_folder_goes_between_two_starts_and_is_cleared_by_the_next(tmp_path: Path) -> None:
    settings = {**tiny(tmp_path), **ENDLESS, **MEMORY}
    launch = ["-m", "megapipe.launch", "--max-restarts", "2"]
    with Job(tmp_path) as job:
        launcher = job.start([*launch, "train.py", *arguments(settings)])
        job.await_text("in-memory checkpoint of step")
        memory = memory_of(launcher)
        job.kill_ranks("in-memory checkpoint of step")
        job.await_text("restarting")
        launcher.send_signal(signal.SIGTERM)
        outcome = job.end()
        assert outcome.codes == [75]
        assert "while it waited for a restart" in outcome.errors[-1]
        assert not memory.exists()
    with Job(tmp_path) as job:
        launcher = job.start([*launch, "train.py", *arguments({**settings, "run.name": "b"})])
        job.await_text("in-memory checkpoint of step")
        memory = memory_of(launcher)
        launcher.kill()
        assert job.end().codes[0] == -signal.SIGKILL
        assert memory.exists()
    with Job(tmp_path) as job:
        job.start([*launch, "-c", "pass"])
        assert job.end().codes == [0]
        assert not memory.exists()
