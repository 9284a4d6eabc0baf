"""The command that shows checkpoints, in a process that permissions bind."""

import pytest

from tests.parity.launches import run_forked
from tests.unit.checkpoint.checkpoint_worlds import save_alone


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "command"),
    [
        (".", ["list", "run"]),
        (".", ["inspect", "run"]),
        ("checkpoints", ["verify", "run/checkpoints"]),
        ("checkpoints", ["delete", "run", "1"]),
    ],
)
def test_a_folder_that_may_not_be_read_is_one_line(tmp_path, place, command):
    save_alone(tmp_path / "run" / "checkpoints", 1)
    (tmp_path / "run" / place).chmod(0)
    ended = run_forked(tmp_path, 1, *command, script="scripts/checkpoint.py", privileged=False)
    (tmp_path / "run" / place).chmod(0o700)
    where = f"run/{place}".removesuffix("/.")
    ended.assert_one_line(5, f"cannot list {where}: Permission denied")
