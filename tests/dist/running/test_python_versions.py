"""Which versions of Python are tried, and what is said of those that are not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.parity.stand_ins import write_program
from tests.running import lowest_python, python_versions

pytestmark = pytest.mark.full
THIS = sys.version_info[:2]


def fake(root: Path, minor: int, venv: str = "exit 1") -> None:
    """Write an interpreter for pyenv that claims this version, and that makes environments only by
    `venv`."""
    path = root / f"versions/3.{minor}.1/bin/python3.{minor}"
    path.parent.mkdir(parents=True)
    write_program(
        path,
        f"#!/bin/sh\ncase $1$2 in -mvenv) {venv};; -m*) exit 1;; *) echo 3 {minor};; esac\n",
    )


@pytest.fixture
def pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a pyenv without versions; no interpreter but this one exists."""
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(python_versions, "declared", lambda: THIS)
    monkeypatch.setattr(lowest_python.shutil, "which", lambda name: None)
    return tmp_path


def test_this_version_runs_in_its_own_environment(
    pyenv: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert python_versions.check()
    assert capsys.readouterr().out == "Python {}.{}: all modules and three steps passed\n".format(
        *THIS
    )


def test_the_highest_is_tried_and_what_lacks_packages_is_told(
    pyenv: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version without them does not fail; one in which something breaks does."""
    monkeypatch.setattr(python_versions, "MODULES", "")
    monkeypatch.setattr(python_versions, "TRAINING", ("-c", ""))
    fake(pyenv, 27)
    fake(pyenv, 28, 'mkdir -p "$3/bin"; cp "$0" "$3/bin/python"')
    assert python_versions.check()
    *_, told = capsys.readouterr().out.splitlines()
    assert told == "Python 3.28 was not tried: the packages cannot be installed for it"

    monkeypatch.setattr(python_versions, "PACKAGES", ())
    monkeypatch.setattr(python_versions, "TRAINING", ("-m", "no_such_module"))
    assert not python_versions.check()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "no_such_module" in first
    assert last == "Python 3.28: all modules and three steps failed"
