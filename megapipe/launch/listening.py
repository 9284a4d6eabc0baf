"""Where the rendezvous store listens: at the address that its peers use, not on all interfaces."""

from __future__ import annotations

import errno
import ipaddress
import socket

BACKLOG = 4096
"""Connections that may wait to be taken, as many as the system allows."""


def listen_towards(address: str, port: int) -> socket.socket:
    """A socket that listens at any free port of the interface by which address:port is reached.

    Raises OSError."""
    with socket.socket(
        socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0][0], socket.SOCK_DGRAM
    ) as probe:
        probe.connect((address, port))  # sends nothing
        own = probe.getsockname()[0]
    return socket.create_server((own, 0), family=probe.family, backlog=BACKLOG)


def listen(address: str, port: int) -> socket.socket | None:
    """A socket that listens at `address` and no other one of this host; port 0: any that is free.

    None where torch has to listen on all interfaces: the address is another's that leads here, as
    that of a service, or a name that this host, but no other one, knows as itself. Raises OSError
    where the port is taken.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return None
    if ipaddress.ip_address(place[0]).is_loopback and address not in (place[0], "localhost"):
        return None
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(place)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise
        return None
    return made
