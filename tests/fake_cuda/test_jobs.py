"""Jobs on the device: the command line from the launcher to a checkpoint, in the NCCL branch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.fake_cuda import build
from tests.fake_cuda.world import DEVICES, Report, faults_of
from tests.parity.jobs import Job, arguments, tiny
from tests.parity.tiers import in_parts

SMALL = {
    "model.hidden": "16",
    "model.heads": "2",
    "train.sequence_length": "16",
    "train.steps": "4",
    "train.validation_samples": "8",
    "train.validate_every": "2",
    "checkpoint.every": "2",
    "log.every": "1",
    "log.timeline": "[2]",
    "run.name": "small",
}


def run(folder: Path, world: int, *args: str, visible: str = "") -> list[Report]:
    """Launch a job, check that it ends well without faults, and return its ranks' reports."""
    reports = folder / "reports"
    reports.mkdir(exist_ok=True)
    environ = {
        "FAKE_CUDA_LIBRARY": str(build.library()),
        "FAKE_CUDA_REPORTS": str(reports),
        "FAKE_CUDA_DEVICES": str(DEVICES),
        "FAKE_CUDA_VISIBLE": visible,
    }
    with Job(folder) as job:
        launch = ["-m", "megapipe.launch", "--nproc", str(world)]
        job.start([*launch, "tests/fake_cuda/train.py", *args], environ)
        done = job.end()
    assert done.codes == [0], done.text
    files = [reports / f"{rank}.pickle" for rank in range(world)]
    found: list[Report] = [pickle.loads(file.read_bytes()) for file in files]
    faults = faults_of(found)
    assert not faults, "\n".join(faults)
    return found


def log_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "small" / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def check_run(folder: Path, steps: int) -> None:
    """Check that the run has trained, validated and drawn a timeline."""
    log = log_of(folder)
    losses = {x["step"]: x["loss"] for x in log if x["kind"] == "step"}
    assert sorted(losses) == list(range(1, steps + 1))
    assert losses[steps] < losses[1]
    validated = {x["step"] for x in log if x["kind"] == "validation"}
    assert {2, steps} <= validated
    assert (folder / "runs" / "small" / "timeline" / "step_000002.svg").exists()


EIGHT = {**SMALL, "train.global_batch": "8", "model.layers": "4"}


@in_parts("visible", ["3 5", "0,1 0,1", ""], full=["0,1 0,1"])
def test_two_devices(visible: str, tmp_path: Path) -> None:
    """Each process sees one device, or both see two, of two or of eight; every job also resumes."""
    settings = {**tiny(tmp_path), **SMALL, "parallel.pp": "2"}
    reports = run(tmp_path, 2, *arguments(settings), visible=visible)
    assert all(report.ledger.communicators > 0 for report in reports), "it ran on gloo"
    check_run(tmp_path, 4)
    settings["train.steps"] = "6"
    run(tmp_path, 2, *arguments(settings), visible=visible)
    check_run(tmp_path, 6)


@pytest.mark.slow
def test_quickstart_on_eight_devices_goes_on_in_another_layout(tmp_path: Path) -> None:
    settings = {**tiny(tmp_path), **EIGHT}
    reports = run(tmp_path, 8, "configs/quickstart.yaml", *arguments(settings))
    assert all(report.ledger.communicators > 0 for report in reports), "it ran on gloo"
    check_run(tmp_path, 4)
    settings |= {"train.steps": "6", "parallel.tp": "1", "parallel.pp": "4", "optimizer.zero": "2"}
    settings |= {"pipeline.schedule": "zb_h1", "pipeline.chunks": "1", "optimizer.offload": "host"}
    run(tmp_path, 8, "configs/quickstart.yaml", *arguments(settings))
    check_run(tmp_path, 6)
