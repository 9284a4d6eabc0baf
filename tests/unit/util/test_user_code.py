"""User-defined code that ends the process where it is imported or called."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.util.user_code import UserCode


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("import sys\nsys.exit()\n", "line 2"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        ("import sys\ndef make(**_):\n    sys.exit(0)\n", "line 3"),
        ("def make(**_):\n    quit()\n", ".py, line 2"),
        ("\ndef make(**_):\n    exit(0)\n", ".py, line 3"),
    ],
    ids=["at its import", "raised", "called", "quit", "exit"],
)
def test_it_is_told_in_one_line(
    text: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run would end with exit code 0, as if it were done."""
    monkeypatch.chdir(tmp_path)
    name = f"ends_{len(text)}"
    (tmp_path / f"{name}.py").write_text(text)
    config = parse([f"pipeline.schedule={name}:make", "parallel.pp=2"]).config
    with pytest.raises(ConfigError, match=f"{name}:make: SystemExit") as told:
        resolve(config, 2, 257)
    assert place in str(told.value)
    with pytest.raises(ConfigError, match="SystemExit"):
        UserCode(f"{name}:make", what="schedule", error=ConfigError).call({}, ())


def test_a_library_that_replaces_exit_is_not_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb replaces it once it is initialised."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "its_hook.py").write_text("def exit(code=0):\n    raise SystemExit(code)\n")
    (tmp_path / "ends.py").write_text("import sys\ndef make(**_):\n    sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    hook = importlib.import_module("its_hook")

    monkeypatch.setattr(sys, "exit", hook.exit)
    with pytest.raises(ConfigError, match=r"SystemExit: 0 \(ends.py, line 3\)"):
        UserCode("ends:make", what="schedule", error=ConfigError).call({}, ())
