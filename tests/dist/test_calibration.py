"""Calibration reads what a real run writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.plan.calibrate import planned
from megapipe.plan.measured_run import MeasuredRun

ROOT = Path(__file__).parents[2]
WORDS = (
    *("model.layers=2", "model.hidden=32", "model.heads=2", "train.sequence_length=32"),
    *("train.microbatch=1", "train.global_batch=4", "train.steps=6", "train.validate_every=0"),
    *("data.validation_fraction=0", "log.timeline=[4,6]", "run.name=a", "parallel.device=cpu"),
)


@pytest.mark.full
def test_times_of_a_run_are_read(tmp_path: Path) -> None:
    """Each recorded kind of operation has a planned time, too."""
    launch = [sys.executable, "-m", "megapipe.launch", "--nproc", "2", "-m", "megapipe"]
    done = subprocess.run(
        [*launch, "train", *WORDS, "parallel.pp=2", f"run.folder={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    run = MeasuredRun.read(tmp_path / "a", ["plan.device=cpu"])
    assert set(run.operations) == {(stage, kind) for stage in (0, 1) for kind in "FB"}
    assert 0 < max(run.operations.values()) < run.step
    times = planned(run, run.units.config.plan.factors)
    assert times.keys() == {*run.operations, None}
    assert min(times.values()) > 0
