"""A rule of the user's, planned by the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.jobs import ROOT
from tests.parity.own_rules import MODULE


@pytest.mark.full
def test_the_plan_knows_a_rule_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the command itself; 4 bytes for each state of a parameter."""
    (tmp_path / "rules.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    optimizer = []
    for rule in ("rules:Good", "adamw", "lion"):
        command = ["train.py", f"optimizer.rule={rule}", "--dry-run"]
        done = subprocess.run(
            [sys.executable, str(ROOT / command[0]), *command[1:]],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        optimizer.append(done.stdout.replace(rule, ""))
    assert optimizer[0] == optimizer[1] != optimizer[2]
