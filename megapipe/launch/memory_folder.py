"""A folder in the memory of a node, for data that must outlive the ranks of one start.

A launcher that may restart its job makes the folder on an in-memory file system, passes the path to
its ranks in an environment variable, and removes the folder when the job ends. The next launcher on
the machine removes the folders of killed launchers.
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
"""Name of a file in the folder. The file identifies the process that has made the folder."""


class MemoryFolder:
    """A launcher's folder in memory. It exists inside the ``with`` block, if `wanted` is true and
    it can be made in `root`."""

    def __init__(self, wanted: bool, root: Path = ROOT) -> None:
        self.path: Path | None = None
        self._wanted = wanted
        self._root = root

    def __enter__(self) -> MemoryFolder:
        from_environment(os.environ)  # drop the variable of an outer job
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
        """Remove the folder with all its contents."""
        if self.path is not None:
            _remove(self.path)

    def leave(self, code: int) -> None:
        """Remove the folder and end this process at once."""
        self.remove()
        os._exit(code)


def from_environment(environ: MutableMapping[str, str]) -> Path | None:
    """Return the folder that a launcher has made, if any, and remove the environment variable, so
    that jobs that this process starts do not use the folder."""
    name = environ.pop(ENVIRONMENT, None)
    return Path(name) if name else None


def clear_leftovers(root: Path) -> None:
    """Remove this user's folders whose launchers are no longer running on this machine."""
    for path in _own(root):
        owner = heartbeat.read(path / OWNER)
        if owner is not None and owner.ended:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder. Its owner file is removed last: if this process is killed meanwhile, the
    rest can still be recognized as a leftover."""
    with contextlib.suppress(OSError):
        for each in path.iterdir():
            if each.name != OWNER:
                shutil.rmtree(each, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)


def _own(root: Path) -> Iterator[Path]:
    """Yield this user's folders of this kind. Folders of other users might contain any link."""
    for path in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                yield path
