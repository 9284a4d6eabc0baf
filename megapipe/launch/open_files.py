"""Open files that a process may have: each connection to a peer is one, and each file of data."""

import contextlib
import errno
import resource

from megapipe.errors import LaunchError

LEAST, USUAL = 64, 512
"""Files besides connections (libraries, data, devices, pipes): what a run cannot do without, and
what leaves room."""
MOST = 10_240
"""Files that macOS lets a process have where it calls the hard limit unlimited."""


def allow_connections(peers: int) -> None:
    """Raise this process' limit of open files so that `peers` others can connect to it.

    Raises :class:`LaunchError` where the hard limit is too low for that.
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
    """Raise this process' limit of open files as far as it goes if the number of a file that it has
    just opened tells that there are many: connections and checkpoints need theirs too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MOST if hard == unlimited else hard
    many = handle >= USUAL // 2 or handle >= soft - LEAST
    if many and soft != unlimited and soft < wanted:
        _set(wanted, hard)


def reason(error: OSError) -> str:
    """Why a file cannot be opened, in words; with the limit where that is what was reached."""
    if error.errno != errno.EMFILE:
        return str(error.strerror)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"{error.strerror} ({soft}): expected a larger ulimit -Hn on this host"


def _set(soft: int, hard: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # a system with another limit of its own
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
