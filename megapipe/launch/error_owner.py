"""Decides which process prints an error that every process has, so that it appears once per job."""

from __future__ import annotations

import errno
import socket
import time

from megapipe.launch.launch_info import LaunchInfo
from megapipe.launch.listen_address import is_loopback, local_address
from megapipe.launch.loopback import loopback_problem

DYING_S = 1.0
"""Seconds that a killed process may take to free its port."""


def may_print_alone(info: LaunchInfo) -> bool:
    """Whether this process, which cannot reach the store, prints an error about it.

    An error owner (:func:`is_error_owner`) prints the error, unless the store's port is still in
    use on this host: then rank 0 prints it. The port is checked for up to DYING_S, in case rank 0
    was killed just now.
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
    """Whether a process prints errors while the store does not answer. These error owners are the
    first process of each node, and also rank 1 if rank 0 hosts the store."""
    return info.local_rank == 0 or (info.rank == 1 and not info.hosted)


def _is_taken(info: LaunchInfo) -> bool:
    """Whether another process will print the error: on this host a program still listens at the
    store's address, or rank 0 meets the same problem."""
    if is_loopback(local_address(info.address)) and loopback_problem() is not None:
        return info.rank > 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((local_address(info.address), info.port))
        except socket.gaierror:  # rank 0 on this host cannot resolve the address either
            return info.local_rank > 0
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
