"""The tests that need a CUDA device, on the simulated one, if the CPU has their kernels too.

Real kernels (``test_ops.py``, except attention tiles and sums of experts' gradients) and the
benchmarks are left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda import build

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "test_rules_cuda": "",
    "test_state_windows": "not dtype3",
    "test_activations_cuda": "not overtake",
    "test_cuda": "not bf16 and not deterministic and not compiled",
    "test_ops": "blocks or experts_keep",
}
"""Files of tests/gpu, and which of their tests run: large sizes take too long on the host."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_file_for_gpus(name: str) -> None:
    environ = {
        **os.environ,
        "FAKE_CUDA_LIBRARY": str(build.library()),
        "FAKE_CUDA_DEVICES": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "tests.fake_cuda.suite", "-q", "-m", "gpu"]
    done = subprocess.run(
        [*command, "-k", FILES[name], f"tests/gpu/{name}.py"],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
