"""Checkpoints of a run that its starts and rewinds pass over as long as there is another.

A file beside such a checkpoint marks it: an empty one, or one that says that no finite step follows
the checkpoint. A mark of the second kind stays when its checkpoint is removed, until there is a
checkpoint of a later step. So a run that makes the same steps once more, and ends at the same one,
is known to do so, also where it has been started again.
"""

from __future__ import annotations

import contextlib
import math

from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import FAILED_PREFIX, CheckpointName
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.errors import CheckpointError

_NOT_FINITE = b"no finite step follows it\n"
_MOST_OF_A_MARK = 1024
"""Bytes of a mark's file."""


class FailedCheckpoints:
    """The marked checkpoints in the folder `root`."""

    def __init__(self, root: StorageLocation, names: dict[str, bool] | None = None) -> None:
        self._root = root
        self.names = names or {}
        """Names of the checkpoints, which may have been removed, each with whether no finite step
        follows it."""

    @classmethod
    def read(cls, root: StorageLocation) -> FailedCheckpoints:
        """Read the marks in `root`. Raises CheckpointError where they cannot be read."""
        return cls(root, {key.name: _not_finite(root, key) for key in _marked(root)})

    @property
    def paths(self) -> list[StorageLocation]:
        """The folders of the checkpoints."""
        return [self._root / name for name in self.names]

    def add(self, name: str, *, not_finite: bool = False) -> None:
        """Mark a checkpoint; where `root` cannot be written to, in memory alone."""
        self.names[name] = self.names.get(name, False) or not_finite
        with contextlib.suppress(OSError, CheckpointError):
            mark(self._root, name, not_finite=self.names[name])

    def forget_reasons(self) -> None:
        """Let steps be finite again, as the model or the optimizer are not what they were."""
        self.names = dict.fromkeys(self.names, False)

    def not_finite(self, *, at_least: int = 0, at_most: int | None = None) -> list[str]:
        """Return the checkpoints of these steps that no finite step follows, oldest first."""
        keys = filter(
            None, (CheckpointName.parsed(name) for name, yes in self.names.items() if yes)
        )
        most = math.inf if at_most is None else at_most
        return [key.name for key in sorted(keys) if at_least <= key.step <= most]


def mark(root: StorageLocation, name: str, *, not_finite: bool = False) -> None:
    """Mark a checkpoint in `root`. Raises OSError or CheckpointError."""
    at(root / f"{FAILED_PREFIX}{name}").replace(_NOT_FINITE if not_finite else b"")


def forget_removed(root: StorageLocation) -> None:
    """Remove the marks of checkpoints that are gone and are of no use any more. Raises OSError or
    CheckpointError."""
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
    return at(root / f"{FAILED_PREFIX}{key.name}").read(_MOST_OF_A_MARK) == _NOT_FINITE
