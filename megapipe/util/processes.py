"""Processes of this machine, as far as the system tells about them."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def machine() -> str:
    """A name that tells machines, and containers that count processes by themselves, apart."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def start_of(pid: int) -> float | None:
    """When a process began, in the machine's own measure; 0 where that is not told, None if there
    is no such process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    with contextlib.suppress(OSError, IndexError, ValueError):
        state, *fields = _status(pid)
        return None if state == "Z" else float(fields[18])
    return 0.0


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process; not by a debugger."""
    with contextlib.suppress(OSError, IndexError):
        return _status(pid)[0] == "T"
    return False


def _status(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on, which is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
