"""The command of the doctor, as it is called."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.errors import LaunchError

ROOT = Path(__file__).parents[3]


@pytest.mark.full
def test_the_command_on_a_machine_without_a_gpu() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "scripts/doctor.py", *arguments]
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUDA_MODULE_LOADING": "LAZY"}
        return subprocess.run(
            command, cwd=ROOT, env=hidden, capture_output=True, text=True, timeout=120
        )

    plain = run()
    assert plain.returncode == 0, plain.stdout + plain.stderr
    assert "note   gpu          none: runs compute on the CPU" in plain.stdout
    spin = run("--spin")
    assert spin.returncode == LaunchError.exit_code
    assert spin.stderr.startswith("megapipe: error: --spin needs a CUDA device")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in plain.stdout
    heeded = "CUDA_DEVICE_MAX_CONNECTIONS=32, CUDA_MODULE_LOADING=LAZY, PYTORCH_ALLOC_CONF="
    assert f"ok     environment  {heeded}expandable_segments:True\n" in spin.stdout
