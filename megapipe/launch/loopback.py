"""Whether processes of this host can reach each other at its loopback address."""

from __future__ import annotations

import errno
import socket

ADDRESS = "127.0.0.1"
CONNECT_S = 5.0
"""How long a connection over loopback may take."""
_BROKEN = (
    errno.EADDRNOTAVAIL,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ETIMEDOUT,
)


def loopback_problem() -> str | None:
    """Say what is wrong if the loopback interface does not work; None if it does."""
    try:
        with socket.create_server((ADDRESS, 0)) as server:
            socket.create_connection(server.getsockname(), timeout=CONNECT_S).close()
    except OSError as error:
        if error.errno in _BROKEN or isinstance(error, TimeoutError):
            return (
                f"the loopback interface does not work (connecting to {ADDRESS}: "
                f"{error.strerror or error}): expected it up, as 'ip link set lo up' has it"
            )
    return None
