"""Commands where the loopback interface is down, in a network namespace of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.errors import LaunchError
from tests.parity.jobs import ROOT, arguments, tiny

WITHOUT = ["unshare", "--map-root-user", "--net"]
"""Command for a namespace whose interfaces are down, as far as this system permits one."""


@pytest.mark.full
@pytest.mark.parametrize("launcher", [[], ["-m", "megapipe.launch", "--nproc", "2"]])
def test_a_run_without_it_ends_in_a_line(launcher: list[str], tmp_path: Path) -> None:
    try:
        subprocess.run([*WITHOUT, "true"], check=True, capture_output=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no network namespaces for this user")
    command = [sys.executable, *launcher, str(ROOT / "train.py"), *arguments(tiny(tmp_path))]
    done = subprocess.run(
        [*WITHOUT, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == LaunchError.exit_code
    begin = "megapipe: error: the loopback interface does not work (connecting to 127.0.0.1: "
    assert done.stderr.startswith(begin)
    assert done.stderr.count("\n") == 1
