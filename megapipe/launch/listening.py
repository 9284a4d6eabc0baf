"""Where the rendezvous store listens: at the address that its peers use, not on all interfaces."""

from __future__ import annotations

import errno
import ipaddress
import socket

BACKLOG = 4096
"""Connections that may wait to be taken, as many as the system allows."""


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


def listen_beside(address: str, port: int) -> tuple[socket.socket, str]:
    """A socket at any free port of this host, and the name of the host for those who reach
    address:port.

    It is at `address` if that is here, else at the interface by which address:port is reached; at
    all of them where this host, but no other one, knows `address` as itself. Raises OSError.
    """
    here = listen(address, 0)
    if here is not None:
        return here, address
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        own = probe.getsockname()[0]
    if ipaddress.ip_address(own).is_loopback:
        return socket.create_server(("", 0), family=family, backlog=BACKLOG), address
    return socket.create_server((own, 0), family=family, backlog=BACKLOG), own
