"""Open files that a process may have: each connection to a peer is one."""

import resource

from megapipe.errors import LaunchError

OTHERS = 512
"""Files besides connections: libraries, data, devices, pipes."""


def allow_connections(peers: int) -> None:
    """Raise this process' limit of open files as far as it goes.

    `peers` may connect, each with a socket of its own. Raises :class:`LaunchError` where even the
    hard limit is too low for that.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = peers + OTHERS
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"open files: the hard limit is {hard}, and {peers} connections need {needed}: "
            f"expected ulimit -Hn {needed} or more on this host"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
