"""What makes a test take its time, found by what it starts."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.running.compilers import compiles, name_of, note_of

KINDS = {
    "stand-in": "on the stand-in for GPUs (`tests/fake_cuda`)",
    "compilation": "starts a compiler or has torch trace a function, itself or in a rank",
    "job": "starts an interpreter or a shell, or forks a script (`tests/parity/launches.py`)",
    "world": "starts other processes: ranks of a world, workers",
    "list": "one of more than 20 cases of a function, within the process of pytest",
    "plain": "all others",
}
"""Kind -> what its tests do; a test is of the first kind that fits."""
LONG_LIST = 20
STAND_IN = Path(__file__).parents[1] / "fake_cuda"
INTERPRETER = re.compile(r"python[\d.]*|(ba)?sh|.*\.(sh|sbatch)")


class Starts:
    """The kinds of processes that were started since the last test."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._note = note_of(os.getpid())
        self._noted = 0
        sys.addaudithook(self._audit)
        _call_at_start(self._kinds)
        _load_in_server("tests.running.server")

    def take(self) -> set[str]:
        """Return the kinds, and begin anew."""
        if (noted := self._note.stat().st_size if self._note.exists() else 0) > self._noted:
            self._kinds.add("compilation")
            self._noted = noted
        taken = set(self._kinds)
        self._kinds.clear()
        return taken

    def close(self) -> None:
        """Remove the file of notes."""
        self._note.unlink(missing_ok=True)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if compiles(event, arguments):
            self._kinds.add("compilation")
        elif event == "subprocess.Popen" and INTERPRETER.fullmatch(name_of(arguments[0])):
            self._kinds.add("job")
        elif event in ("os.fork", "os.forkpty"):
            self._kinds.add("world")


def _call_at_start(kinds: set[str]) -> None:
    """Have `multiprocessing` add the kind of each process that it starts."""
    start = BaseProcess.start

    def start_and_add(self: BaseProcess) -> None:
        target = getattr(self, "_target", None)
        script = getattr(target, "__module__", "") == "tests.parity.launches"
        kinds.add("job" if script else "world")
        start(self)

    BaseProcess.start = start_and_add  # type: ignore[method-assign]


def _load_in_server(module: str) -> None:
    """Have the server of processes load a module before those that it is told to load."""
    preload = forkserver.set_forkserver_preload
    forkserver.set_forkserver_preload = lambda modules_names: preload([module, *modules_names])


class Lists:
    """The functions of a session that have long lists of cases."""

    def __init__(self, items: Sequence[pytest.Item]) -> None:
        self._cases = Counter(map(_function, items))

    def has(self, item: pytest.Item) -> bool:
        """Whether a test is one of a long list."""
        return self._cases[_function(item)] > LONG_LIST


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def kind_of(item: pytest.Item, started: set[str], lists: Lists) -> str:
    """Return the kind of a test that has started processes of these kinds."""
    if STAND_IN in item.path.parents:
        return "stand-in"
    for kind in ("compilation", "job", "world"):
        if kind in started:
            return kind
    return "list" if lists.has(item) else "plain"
