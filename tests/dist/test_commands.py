"""The console command, called from a folder that is not the repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

from megapipe.errors import DoesNotFit

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a folder that is not the repository's."""
    return subprocess.run(
        [sys.executable, "-m", "megapipe", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_preset_is_planned_from_any_folder(tmp_path: Path) -> None:
    done = run(tmp_path, "train", "quickstart", "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("plan of quickstart\n")
    assert run(tmp_path, "train", "configs/quickstart.yaml", "--dry-run").stdout == done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_does_not_fit_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """Beside the whole plan, which is all that stdout has."""
    small = "plan.device_gb=0.01"
    for form, begin in (([], "plan of quickstart\n"), (["--json"], "{")):
        done = run(tmp_path, "train", "quickstart", "--dry-run", *form, small)
        assert done.returncode == DoesNotFit.exit_code == 10
        assert done.stdout.startswith(begin)
        assert done.stderr.startswith("megapipe: error: quickstart and command line: a process ")
        assert "which does NOT fit in 0.01 GB of cpu: " in done.stderr
        assert done.stderr.count("\n") == 1
    assert json.loads(done.stdout)["memory"]["fits"] is False
    done = run(tmp_path, "train", "quickstart", "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["memory"]["fits"] is True
