"""Names inside the folder that holds a run's checkpoints.

=========================  ====================================================================
name                       what it is
=========================  ====================================================================
step-00000100              a committed checkpoint
step-00000100.1            a later one of the same step: a committed folder is never written to
                           again nor replaced, so saving a step twice makes a second folder
step-00000100-0f3c...      a checkpoint on object storage, where no folder can be renamed: the
                           name has that of its attempt, and counts once it has a manifest
latest                     text file with the name of the last commit, for people and tools;
                           loading scans the folder instead and never reads it
.failed-step-00000100      a mark: starts and rewinds pass over that checkpoint as long as there is
                           another; see :mod:`megapipe.checkpoint.failed`
.removed                   text file with a name such as step-00000300.1: checkpoints up to this
                           step and attempt were removed, and none of their names is given again
.staging-...               being written, or being removed, or left behind by a killed process
=========================  ====================================================================
"""

import re
from typing import NamedTuple

MANIFEST = "manifest.json"
"""In a checkpoint's folder."""
POINTER = "latest"
STAGING_PREFIX = ".staging-"
FAILED_PREFIX = ".failed-"
REMOVED = ".removed"
_NAME = re.compile(r"step-([0-9]{8,15})(?:\.([1-9][0-9]{0,5}))?(?:-([0-9a-f]{16}))?")


class CheckpointName(NamedTuple):
    """Name of a checkpoint folder, ordered from old to new; `attempt` 0 has no suffix."""

    step: int
    attempt: int
    mark: str = ""
    """Of the attempt, on object storage: 16 hexadecimal digits."""

    @classmethod
    def parsed(cls, name: str) -> "CheckpointName | None":
        """A folder's name read, None if it is of another form."""
        match = _NAME.fullmatch(name)
        key = cls(int(match[1]), int(match[2] or 0), match[3] or "") if match else None
        return key if key is not None and key.name == name else None

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.plain + (f"-{self.mark}" if self.mark else "")

    @property
    def plain(self) -> str:
        """The name without the attempt's mark."""
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")
