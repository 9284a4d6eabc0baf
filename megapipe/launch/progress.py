"""How far a run has come, told to the launcher that has started it.

A launcher that starts a job again has to know whether the program is a run that can go on, and
whether it comes further each time. It names a file in the environment; the first rank of the node
writes three numbers there. The launcher may ask the next start for an older checkpoint by the same
way.
"""

from __future__ import annotations

import os
import struct
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = "MEGAPIPE_PROGRESS"
_FORM = struct.Struct("=qqq")


class Progress(NamedTuple):
    """Numbers of steps; -1 where there is none."""

    first: int = -1
    """Steps that were done when this start began to train."""
    step: int = -1
    """Steps that are done."""
    before: int = -1
    """Of the launcher, from the second start on: to begin with a checkpoint of fewer steps, if
    there is one; 0: with the newest."""


def read(path: Path) -> Progress:
    """The record that was written last; an empty one if there is none."""
    try:
        content = path.read_bytes()
    except OSError:
        return Progress()
    return Progress(*_FORM.unpack(content)) if len(content) == _FORM.size else Progress()


def write(path: Path, progress: Progress) -> None:
    """Write a record over the one before, in one call."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(handle, _FORM.pack(*progress), 0)
    finally:
        os.close(handle)


def told(environ: MutableMapping[str, str]) -> Path | None:
    """Where a launcher waits for the record, if one does; jobs that this process starts are not
    told."""
    name = environ.pop(ENVIRONMENT, None)
    return Path(name) if name else None
