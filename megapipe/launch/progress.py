"""How far a run has come, told to the launcher that has started it, and what that asks of it.

A launcher that starts a job again has to know whether the program is a run that can go on, and
whether it comes further each time. It names a file in the environment, in which there are two
records: the first rank of the node writes one, and the launcher the other.
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
    """Of a run. Numbers of steps; -1 where there is none."""

    first: int = -1
    """Steps of the checkpoint that this start has chosen, 0 without one."""
    step: int = -1
    """Steps that are done, once the start trains."""
    ends: int = 0
    """1: it has stopped before its last step because a callback wished so."""


class Request(NamedTuple):
    """Of a launcher."""

    before: int = -1
    """From the second start on: to begin with a checkpoint of fewer steps, if there is one; 0: with
    the newest."""
    regroup: int = 0
    """1: to save and stop, so that nodes that have come can take part."""


def read(path: Path) -> Progress:
    """The record that the run wrote last; an empty one if there is none."""
    content = _read(path, 0, _FORM.size)
    return Progress(*_FORM.unpack(content)) if len(content) == _FORM.size else Progress()


def write(path: Path, progress: Progress) -> None:
    """Write the run's record over the one before, in one call."""
    _write(path, 0, _FORM.pack(*progress))


def read_request(path: Path) -> Request:
    """The wishes of the launcher; none if it has none."""
    content = _read(path, _FORM.size, _REQUEST_FORM.size)
    whole = len(content) == _REQUEST_FORM.size
    return Request(*_REQUEST_FORM.unpack(content)) if whole else Request()


def write_request(path: Path, request: Request) -> None:
    """Ask the run for it."""
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
    """Where a launcher waits for the record, if one does; jobs that this process starts are not
    told."""
    name = environ.pop(ENVIRONMENT, None)
    return Path(name) if name else None


def is_again(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has started the job before."""
    name = environ.get(ENVIRONMENT)
    return name is not None and read_request(Path(name)).before >= 0
