"""A run's progress, recorded for its launcher, and the launcher's requests to the run.

A launcher that restarts a job has to know whether the program is a run that can continue, and
whether each start makes progress. The launcher names a file in an environment variable. The file
has two records: the first rank of the node writes one, and the launcher writes the other.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

ENVIRONMENT = "MEGAPIPE_PROGRESS"
_FORM = struct.Struct("=qqq")
_REQUEST_FORM = struct.Struct("=qq")


class Progress(NamedTuple):
    """A run's progress, for its launcher. `first` and `step` are -1 until they are known."""

    first: int = -1
    """Number of steps in the checkpoint with which this start begins; 0 without a checkpoint."""
    step: int = -1
    """Number of steps that the run has done, over all starts; known once this start trains."""
    ends: int = 0
    """1 if the run has stopped before its last step because a callback requested it, else 0."""


class Request(NamedTuple):
    """A launcher's request to the run."""

    before: int = -1
    """Bound for the checkpoint to resume from. n > 0: the newest of fewer than n steps, if there is
    one; 0: the newest of all; -1: no request, as in the first start."""
    regroup: int = 0
    """1 if the run shall save and stop so that new nodes can take part, else 0."""


def read(path: Path) -> Progress:
    """Read the run's last record; return an empty record if the run has not written any."""
    content = _read(path, 0, _FORM.size)
    return Progress(*_FORM.unpack(content)) if len(content) == _FORM.size else Progress()


def write(path: Path, progress: Progress) -> None:
    """Write the run's record over its previous one, in one system call."""
    _write(path, 0, _FORM.pack(*progress))


def read_request(path: Path) -> Request:
    """Read the launcher's request; return an empty request if the launcher has not written any."""
    content = _read(path, _FORM.size, _REQUEST_FORM.size)
    whole = len(content) == _REQUEST_FORM.size
    return Request(*_REQUEST_FORM.unpack(content)) if whole else Request()


def write_request(path: Path, request: Request) -> None:
    """Write the launcher's request."""
    _write(path, _FORM.size, _REQUEST_FORM.pack(*request))


def _read(path: Path, offset: int, size: int) -> bytes:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.pread(handle, size, offset)
    finally:
        os.close(handle)


def _write(path: Path, offset: int, content: bytes) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(handle, content, offset)
    finally:
        os.close(handle)


def from_environment(environ: MutableMapping[str, str]) -> Path | None:
    """Return the file that a launcher has named, if any, and remove the environment variable, so
    that jobs that this process starts do not use the file."""
    name = environ.pop(ENVIRONMENT, None)
    return Path(name) if name else None


def is_restart(environ: Mapping[str, str]) -> bool:
    """Whether the launcher has restarted the job, so that this is not its first start."""
    name = environ.get(ENVIRONMENT)
    return name is not None and read_request(Path(name)).before >= 0
