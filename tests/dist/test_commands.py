"""The console command, called from a folder that is not the repository."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in a folder that is not the repository's."""
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
