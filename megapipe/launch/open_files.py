"""Open files that a process may have: each connection to a peer is one."""

import contextlib
import resource

from megapipe.errors import LaunchError

LEAST, USUAL = 64, 512
"""Files besides connections (libraries, data, devices, pipes): what a run cannot do without, and
what leaves room."""


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
        with contextlib.suppress(ValueError, OSError):  # a system with another limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
