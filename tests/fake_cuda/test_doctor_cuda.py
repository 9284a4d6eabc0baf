"""The doctor runs to its end on a device; its measurements mean nothing."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest

from tests.fake_cuda.world import run_world


def doctors(world: Any) -> tuple[int, str]:
    from megapipe.launch import cuda_spin_probe, doctor

    cuda_spin_probe.SECONDS, cuda_spin_probe.SIZE = 0.01, 64
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = doctor.main(["--spin"])
    return code, out.getvalue()


@pytest.mark.slow
def test_it_runs_through() -> None:
    ((code, text),) = run_world(1, doctors)
    assert code == 0, text
    lines = text.splitlines()
    assert sum(line.startswith("ok     gpu ") for line in lines) == 8
    assert sum(" ms  " in line for line in lines) == 13
    assert sum("spinning blocks" in line for line in lines) == 5
