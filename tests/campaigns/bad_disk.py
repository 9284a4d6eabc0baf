"""A disk that fails: the k-th operation of a save that changes something on it is refused."""

from __future__ import annotations

import builtins
import errno
import io
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megapipe.checkpoint import durable
from megapipe.train.callbacks import Run
from tests.campaigns.rank import Fault

CALLS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
"""Calls of `os` that a save makes, besides opening and writing files."""
FULL = "full"
"""The disk is filled up before the operation, which is then carried out."""
LASTING = ("ENOSPC", "EROFS")
"""Faults after which all operations fail; the disk of another has one bad place."""
FREES = ("unlink", "rmdir")
"""Operations that succeed on a full disk."""
ALL = -1
"""A value in place of a rank: no operation fails, and all are counted."""


class BadDisk(Fault):
    """Lets operation `at` of the save after a step, counted from 0, fail with `error`, the name of
    an errno or FULL.

    With the rank ALL none fails, and each rank writes the names of its operations to
    `operations-RANK` at its next save.
    """

    def __init__(self, folder: Path, rank: int, step: int, at: int, error: str) -> None:
        super().__init__(folder, rank, step)
        self._at, self._error = at, error
        self._real = {name: getattr(os, name) for name in CALLS}
        self._numbers = itertools.count()
        self._made: list[str] = []
        self._fails = threading.Event()

    def arm(self, run: Run) -> None:
        """Do nothing yet: the save comes later, in :meth:`before_save`."""

    def before_save(self, run: Run, step: int) -> None:
        if self.rank not in (ALL, run.mesh.rank):
            return
        if step == self.step and self.armed:
            self._checkpoints = run.folder / "checkpoints"
            durable.open = self._open  # type: ignore[attr-defined]
            for name, real in self._real.items():
                setattr(os, name, self._failing(name, real))
        elif self._made:
            for name, real in self._real.items():
                setattr(os, name, real)
            (self.folder / f"operations-{run.mesh.rank}").write_text(json.dumps(self._made))

    def _open(self, path: Path, mode: str, **given: Any) -> Any:
        if mode != "xb":
            return builtins.open(path, mode, **given)
        self._operate("open", str(path))
        return io.BufferedWriter(_File(path, lambda: self._operate("write", str(path))))

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **given: Any) -> Any:
            self._operate(name, _path(args[0], given.get("dir_fd")))
            return real(*args, **given)

        return call

    def _operate(self, name: str, path: str) -> None:
        """Count an operation among the checkpoints; raise OSError if it is to fail."""
        if not path.startswith(str(self._checkpoints)):
            return
        self._made.append(name)
        if next(self._numbers) == self._at and self.rank != ALL:
            self.struck()
            self._fails.set()
            if self._error == FULL:
                fill(self.folder / "disk")
                return
        elif not (self._fails.is_set() and self._error in LASTING):
            return
        if self._error == "ENOSPC" and name in FREES:
            return
        number = getattr(errno, self._error)
        raise OSError(number, os.strerror(number), path)


def _path(what: Any, folder: int | None) -> str:
    """Return the path that a call of `os` is given: an open file, a name in an open folder, or a
    path."""
    if isinstance(what, int):
        return os.readlink(f"/proc/self/fd/{what}")
    if folder is not None:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), what)
    return os.fspath(what)


class _File(io.FileIO):
    """A new file each of whose writes is an operation."""

    def __init__(self, path: Path, operate: Callable[[], None]) -> None:
        super().__init__(path, "xb")
        self._operate = operate

    def write(self, data: Any) -> int:
        self._operate()
        return super().write(data)


def fill(folder: Path) -> None:
    """Leave no byte free on the disk of a folder, by a file `filler` in it."""
    with open(folder / "filler", "ab", buffering=0) as file:
        size = max(shutil.disk_usage(folder).free, 4096)
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
