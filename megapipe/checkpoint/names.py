"""Names inside the folder that holds a run's checkpoints.

=========================  ====================================================================
name                       what it is
=========================  ====================================================================
step-00000100              a committed checkpoint
step-00000100.1            a later checkpoint of the same step: a committed folder is never written
                           to again nor replaced, so saving a step twice makes a second folder
step-00000100-0f3c...      a folder on object storage, where folders cannot be renamed: the name
                           ends with a random suffix, and a manifest makes it a checkpoint
latest                     text file with the name of the last commit, for people and tools;
                           loading scans the folder instead and never reads it
.failed-step-00000100      a mark of a failed checkpoint: starts and rewinds use another one if
                           there is one; see :mod:`megapipe.checkpoint.failed`
.removed                   text file with a name such as step-00000300.1: checkpoints up to this
                           step and attempt were removed, and their names are never reused
.staging-...               a folder or file that is being written or removed, or that a killed
                           process has left
=========================  ====================================================================
"""

import re
from typing import NamedTuple

MANIFEST = "manifest.json"
"""Name of the manifest in a checkpoint's folder."""
POINTER = "latest"
STAGING_PREFIX = ".staging-"
FAILED_PREFIX = ".failed-"
REMOVED = ".removed"
_NAME = re.compile(r"step-([0-9]{8,15})(?:\.([1-9][0-9]{0,5}))?(?:-([0-9a-f]{16}))?")


class CheckpointName(NamedTuple):
    """The name of a checkpoint folder; names are ordered from old to new. `attempt` counts the
    earlier checkpoints of the same step; the name shows it unless it is 0."""

    step: int
    attempt: int
    suffix: str = ""
    """Random suffix of the name on object storage, 16 hexadecimal digits; empty on disk."""

    @classmethod
    def parsed(cls, name: str) -> "CheckpointName | None":
        """Parse a folder's name; None if it has another form."""
        match = _NAME.fullmatch(name)
        key = cls(int(match[1]), int(match[2] or 0), match[3] or "") if match else None
        return key if key is not None and key.name == name else None

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.plain + (f"-{self.suffix}" if self.suffix else "")

    @property
    def plain(self) -> str:
        """Name without the random suffix."""
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")
