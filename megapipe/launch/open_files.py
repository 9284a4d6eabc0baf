"""Raises a process's limit of open files. Each connection to a peer and each data file counts."""

import contextlib
import errno
import resource

from megapipe.errors import LaunchError

LEAST, USUAL = 64, 512
"""Numbers of open files besides connections (libraries, data, devices, pipes): the least that a run
needs, and a comfortable number."""
MOST = 10_240
"""Limit of open files per process on macOS, which may report the hard limit as unlimited."""


def allow_connections(peers: int) -> None:
    """Raise this process's limit of open files so that `peers` processes can connect to it.

    Raises :class:`LaunchError` if the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if hard != unlimited and hard < peers + LEAST:
        raise LaunchError(
            f"open files: the hard limit is {hard}, and {peers} connections need more: expected "
            f"ulimit -Hn {peers + USUAL} or more on this host"
        )
    wanted = peers + USUAL if hard == unlimited else min(peers + USUAL, hard)
    if soft != unlimited and soft < wanted:
        _set(wanted, hard)


def leave_room(handle: int) -> None:
    """Raise this process's limit of open files as far as possible if many files are open already:
    connections and checkpoints need files too. `handle`: a descriptor that was just opened; its
    number shows how many files are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST if hard == unlimited else hard
    many = handle >= USUAL // 2 or handle >= soft - LEAST
    if many and soft != unlimited and soft < wanted:
        _set(wanted, hard)


def reason(error: OSError) -> str:
    """Return the reason why a file cannot be opened; with the limit, if it was reached."""
    if error.errno != errno.EMFILE:
        return str(error.strerror)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error.strerror} ({soft}): expected a larger ulimit -Hn on this host"


def _set(soft: int, hard: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # the system may have a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
