"""Checks whether processes of this host can reach each other at its loopback address."""

from __future__ import annotations

import errno
import socket

ADDRESS = "127.0.0.1"
CONNECT_S = 5.0
"""Longest time to connect over loopback, seconds."""
_BROKEN = (
    errno.EADDRNOTAVAIL,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
)


def loopback_problem() -> str | None:
    """Return a description of what is wrong with the loopback interface; None if it works."""
    try:
        with socket.create_server((ADDRESS, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        if error.errno in _BROKEN or isinstance(error, TimeoutError):
            return (
                f"the loopback interface does not work (connecting to {ADDRESS}: "
                f"{error.strerror or error}): enable it with 'ip link set lo up'"
            )
    return None
