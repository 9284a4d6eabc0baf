"""Identity and state of processes on this machine, from /proc if it exists."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path


def machine() -> str:
    """Return a text that identifies this machine since its boot, and this container if it has its
    own process ids. Processes with equal texts can check each other's process ids."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def start_of(pid: int) -> float | None:
    """Return the start time of process `pid` in clock ticks since boot; 0 if the system hides it,
    None if no such process runs."""
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
    """Whether a signal such as SIGSTOP has suspended the process; a debugger's stop is ignored."""
    with contextlib.suppress(OSError, IndexError):
        return _status(pid)[0] == "T"
    return False


def _status(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat without the first two; the process state comes first."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
