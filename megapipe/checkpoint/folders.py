"""Names inside the folder that holds a run's checkpoints.

=========================  ====================================================================
name                       what it is
=========================  ====================================================================
step-00000100              a committed checkpoint
step-00000100.1            a later one of the same step: a committed folder is never written to
                           again nor replaced, so saving a step twice makes a second folder
latest                     text file with the name of the last commit, for people and tools;
                           loading scans the folder instead and never reads it
.failed-step-00000100      an empty file: starts from that checkpoint failed again and again, so
                           another is taken as long as there is one
.staging-...               being written, or being removed, or left behind by a killed process
=========================  ====================================================================
"""

import os
import re
from pathlib import Path
from typing import NamedTuple

POINTER = "latest"
STAGING_PREFIX = ".staging-"
FAILED_PREFIX = ".failed-"
_NAME = re.compile(r"step-([0-9]{8,15})(?:\.([1-9][0-9]{0,5}))?")


class Committed(NamedTuple):
    """Name of a checkpoint folder, ordered from old to new; `attempt` 0 has no suffix."""

    step: int
    attempt: int

    @property
    def name(self) -> str:
        """The folder's name."""
        return f"step-{self.step:08d}" + (f".{self.attempt}" if self.attempt else "")

    @classmethod
    def named(cls, name: str) -> "Committed | None":
        """The checkpoint whose folder has this name; None if it is none's."""
        match = _NAME.fullmatch(name)
        key = cls(int(match[1]), int(match[2] or 0)) if match else None
        return key if key is not None and key.name == name else None


def committed(root: Path) -> list[Committed]:
    """The checkpoint folders in `root` by name, newest first; none if `root` does not exist.

    Order is that of step numbers, never of file times. Symbolic links are passed over.
    """
    found = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                key = Committed.named(entry.name)
                if key is not None and entry.is_dir(follow_symlinks=False):
                    found.append(key)
    except FileNotFoundError:
        return []
    return sorted(found, reverse=True)


def next_name(root: Path, step: int) -> str:
    """A name for a new checkpoint of `step` that sorts after all existing ones of that step."""
    attempts = [key.attempt for key in committed(root) if key.step == step]
    return Committed(step, max(attempts, default=-1) + 1).name
