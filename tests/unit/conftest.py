"""Fixtures of several unit tests, and one that refuses every process."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib import import_module
from multiprocessing import util
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from megapipe.schedule.commands import main

STARTS: tuple[tuple[Any, str], ...] = (
    (subprocess.Popen, "__init__"),
    (BaseProcess, "start"),
    (util, "spawnv_passfds"),
    *((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
)
"""Functions that start a process, whoever calls them."""

platform.platform()  # starts `uname` when it is first asked


def _refusal(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(*given: object, **options: object) -> Any:
        words = [word for word in given if isinstance(word, str | list | tuple)]
        if any(list(word)[:1] == ["fc-list"] for word in words):
            return start(*given, **options)  # matplotlib, once on a machine: it keeps the list
        pytest.fail(f"it starts a process, {name}{words}: it belongs in tests/dist", pytrace=False)

    return refuse


@pytest.fixture(autouse=True, scope="module")
def _alone() -> Iterator[None]:
    """Have a test fail that starts a process."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in STARTS:
            patch.setattr(owner, name, _refusal(f"{owner.__name__}.{name}", getattr(owner, name)))
        yield


@pytest.fixture
def without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep runs from asking git, a process, for the commit of the sources."""
    module = import_module("megapipe.observe.provenance")  # the package has a function of this name
    monkeypatch.setattr(module, "git_state", lambda root: None)


@pytest.fixture
def ask(capsys):
    """Return a function that runs a command of scripts/schedule.py and returns its output."""

    def run(*argv: object) -> str:
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        return out

    return run
