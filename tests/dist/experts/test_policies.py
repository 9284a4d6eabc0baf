"""Decisions about experts, by processes whose hashes of strings differ."""

from __future__ import annotations

import subprocess
import sys

DECIDE = """
from tests.unit.experts.decisions import decisions
print(decisions())
"""


def test_all_processes_decide_alike() -> None:
    """Also where the order of sets differs."""
    found = {
        subprocess.run(
            [sys.executable, "-c", DECIDE],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
    assert "owners" in found.pop()
