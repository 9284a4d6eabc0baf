"""Who tells the user of an error that every process has, and how: one line, once per job."""

from __future__ import annotations

import errno
import socket
import time

from megapipe.launch.listening import is_loopback, local_address
from megapipe.launch.loopback import loopback_problem
from megapipe.launch.place import LaunchInfo

DYING_S = 1.0
"""How long a killed process may take to give back its port."""


def may_print_alone(info: LaunchInfo) -> bool:
    """Whether a process that cannot reach the store reports that.

    Those of :func:`is_error_owner` do, unless the port stays taken on their host: then rank 0
    reports it. A rank 0 that was killed gives the port back in a moment.
    """
    if not is_error_owner(info):
        return False
    deadline = time.monotonic() + DYING_S
    while _is_taken(info):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_error_owner(info: LaunchInfo) -> bool:
    """Whether a process is one of the few that speak where the store cannot be asked: the first of
    each node and, where rank 0 has the store, rank 1."""
    return info.local_rank == 0 or (info.rank == 1 and not info.hosted)


def _is_taken(info: LaunchInfo) -> bool:
    """Whether a program on this host listens where the store should be, or would, or rank 0 is on
    this host and has the same problem."""
    if is_loopback(local_address(info.address)) and loopback_problem() is not None:
        return info.rank > 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((local_address(info.address), info.port))
        except socket.gaierror:  # nor does rank 0 know the address, if it is on this host
            return info.local_rank > 0
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
