"""The folder in memory of a launcher: private, told to its ranks alone, and gone in the end."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from megapipe.launch.memory_folder import ENVIRONMENT, OWNER, MemoryFolder, from_environment


def test_it_is_there_for_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT, "/dev/shm/of-another-job")
    with MemoryFolder(True, tmp_path) as memory:
        assert memory.path is not None
        assert os.environ[ENVIRONMENT] == str(memory.path)
        assert memory.path.stat().st_mode & 0o777 == 0o700
        (memory.path / "step").mkdir()
        environ = dict(os.environ)
        assert from_environment(environ) == memory.path
        assert from_environment(environ) is None, "those that a rank starts are not told"
    assert ENVIRONMENT not in os.environ
    assert list(tmp_path.iterdir()) == []


def test_there_is_none_where_none_is_wanted_or_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENVIRONMENT, "/dev/shm/of-another-job")
    for wanted, root in ((False, tmp_path), (True, tmp_path / "nowhere")):
        with MemoryFolder(wanted, root) as memory:
            assert memory.path is None
            assert ENVIRONMENT not in os.environ


class Killed(BaseException):
    """An error in place of a signal."""


def test_a_launcher_that_is_killed_while_it_removes_it_leaves_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launcher finds the owner and removes the rest."""
    copies, real, number = 50, os.rmdir, count(1)  # one is killed, at the last copy

    def rmdir(*given: Any, **more: Any) -> None:
        if next(number) == copies:
            raise Killed
        real(*given, **more)

    with MemoryFolder(True, tmp_path) as memory:
        assert memory.path is not None
        for step in range(copies):
            (memory.path / f"step-{step}").mkdir()
        monkeypatch.setattr(os, "rmdir", rmdir)
        with pytest.raises(Killed):
            memory.remove()
        assert (memory.path / OWNER).exists()
    assert list(tmp_path.iterdir()) == []
