"""Marks of failed checkpoints: starts and rewinds use a marked checkpoint only if no other exists.

A mark is a file next to the checkpoint. It is empty, or says that no finite step follows the
checkpoint: in the first step after it, whatever the samples, values are not finite. A mark that
says so is kept after its checkpoint is removed, until there is a checkpoint of a later step. So a
run that fails again at the same step is recognised, even after a restart.
"""

from __future__ import annotations

import contextlib
import math

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import FAILED_PREFIX, CheckpointName
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError

_NOT_FINITE = b"no finite step follows it\n"
_MAX_MARK_BYTES = 1024
"""Maximum bytes of a mark's file."""


class FailedCheckpoints:
    """The marked checkpoints in the folder `root`."""

    def __init__(self, root: StorageLocation, names: dict[str, bool] | None = None) -> None:
        self._root = root
        self.names = names or {}
        """Marked checkpoints by name: True if the mark says that no finite step follows, False if
        the mark is empty. A marked checkpoint may have been removed."""

    @classmethod
    def read(cls, root: StorageLocation) -> FailedCheckpoints:
        """Read the marks in `root`. Raises CheckpointError if they cannot be read."""
        return cls(root, {key.name: _not_finite(root, key) for key in _marked(root)})

    @property
    def paths(self) -> list[StorageLocation]:
        """Folders of the marked checkpoints."""
        return [self._root / name for name in self.names]

    def add(self, name: str, *, not_finite: bool = False) -> None:
        """Mark the checkpoint `name`; `not_finite`: the mark says that no finite step follows. If
        `root` cannot be written, the mark is only in this object."""
        self.names[name] = self.names.get(name, False) or not_finite
        with contextlib.suppress(OSError, CheckpointError):
            mark(self._root, name, not_finite=self.names[name])

    def forget_reasons(self) -> None:
        """Forget in this object which marks say that no finite step follows: after a change of the
        model or the optimizer, a finite step may follow. The mark files stay as they are."""
        self.names = dict.fromkeys(self.names, False)

    def not_finite(self, *, at_least: int = 0, at_most: int | None = None) -> list[str]:
        """Return the names of the checkpoints that no finite step follows, oldest first: those of
        steps `at_least` to `at_most` (None: no upper limit)."""
        keys = filter(
            None, (CheckpointName.parsed(name) for name, yes in self.names.items() if yes)
        )
        most = math.inf if at_most is None else at_most
        return [key.name for key in sorted(keys) if at_least <= key.step <= most]


def mark(root: StorageLocation, name: str, *, not_finite: bool = False) -> None:
    """Write the mark of the checkpoint `name` in `root`; `not_finite`: the mark says that no finite
    step follows. Raises OSError or CheckpointError."""
    at(root / f"{FAILED_PREFIX}{name}").replace(_NOT_FINITE if not_finite else b"")


def forget_removed(root: StorageLocation) -> None:
    """Delete the marks of removed checkpoints. A mark which says that no finite step follows stays
    until there is a checkpoint of a later step. Raises OSError or CheckpointError."""
    left = committed(root)
    newest = max((key.step for key in left), default=-1)
    for key in set(_marked(root)) - set(left):
        if key.step < newest or not _not_finite(root, key):
            at(root / f"{FAILED_PREFIX}{key.name}").unlink()


def _marked(root: StorageLocation) -> list[CheckpointName]:
    marks = (name for name in at(root).names() if name.startswith(FAILED_PREFIX))
    return [
        *filter(None, (CheckpointName.parsed(name.removeprefix(FAILED_PREFIX)) for name in marks))
    ]


def _not_finite(root: StorageLocation, key: CheckpointName) -> bool:
    return at(root / f"{FAILED_PREFIX}{key.name}").read(_MAX_MARK_BYTES) == _NOT_FINITE
