"""A folder in the memory of a node, for what is to outlive the ranks of a start.

A launcher that starts a job again makes it on a file system that lives in memory, names it to its
ranks in the environment, and removes it when the job ends. What a launcher has left that was killed
is removed by the next one on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, MutableMapping
from dataclasses import asdict
from pathlib import Path

from megapipe.util import heartbeat

ENVIRONMENT = "MEGAPIPE_MEMORY"
ROOT = Path("/dev/shm")
PREFIX = "megapipe-memory-"
OWNER = "owner"
"""File in the folder: the process that has made it."""


class MemoryFolder:
    """The folder of a launcher, from the beginning of the block to its end, if it is `wanted` and
    `root` is there to be written to."""

    def __init__(self, wanted: bool, root: Path = ROOT) -> None:
        self.path: Path | None = None
        self._wanted = wanted
        self._root = root

    def __enter__(self) -> MemoryFolder:
        from_environment(os.environ)  # that of a job in which this one is started is not for it
        if self._wanted:
            clear_leftovers(self._root)
            with contextlib.suppress(OSError):
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._root))
                (self.path / OWNER).write_text(json.dumps(asdict(heartbeat.Owner.this_process())))
                os.environ[ENVIRONMENT] = str(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        from_environment(os.environ)
        self.remove()

    def remove(self) -> None:
        """Remove it with all that is in it."""
        if self.path is not None:
            _remove(self.path)

    def leave(self, code: int) -> None:
        """Remove it and end this process at once."""
        self.remove()
        os._exit(code)


def from_environment(environ: MutableMapping[str, str]) -> Path | None:
    """The folder that a launcher has made, if one has; jobs that this process starts are not
    told."""
    name = environ.pop(ENVIRONMENT, None)
    return Path(name) if name else None


def clear_leftovers(root: Path) -> None:
    """Remove this user's folders whose launchers have ended on this machine."""
    for path in _own(root):
        owner = heartbeat.read(path / OWNER)
        if owner is not None and owner.ended:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder, its owner last: what a killed process leaves of it is known to be left."""
    with contextlib.suppress(OSError):
        for each in path.iterdir():
            if each.name != OWNER:
                shutil.rmtree(each, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def _own(root: Path) -> Iterator[Path]:
    """Folders of this user's; those of others may lead anywhere."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                yield path
