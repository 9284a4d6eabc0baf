"""A user-defined update rule, planned by the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.launches import fork_script
from tests.parity.user_rules import MODULE


@pytest.mark.full
def test_the_plan_knows_a_rule_of_the_user_s(tmp_path: Path) -> None:
    """The command itself plans it, with 4 bytes for each state of a parameter."""
    (tmp_path / "rules.py").write_text(MODULE)
    optimizer = []
    for rule in ("rules:Good", "adamw", "lion"):
        done = fork_script(tmp_path, "train.py", f"optimizer.rule={rule}", "--dry-run")
        assert done.code == 0, done.err
        optimizer.append(done.out.replace(rule, ""))
    assert optimizer[0] == optimizer[1] != optimizer[2]
