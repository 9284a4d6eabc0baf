"""Finds the address at which a job listens: the one that its peers use, not all interfaces."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

BACKLOG = 4096
"""Number of connections that may wait to be accepted; the system may allow fewer."""
INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that name the network interface between the nodes."""
STORE = "the rendezvous store"
_VARIABLES = " or ".join(INTERFACES)
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""

Report = Callable[[str], object]
"""Function that prints a line for the user."""


def local_address(address: str) -> str:
    """Return the address to connect to, or to listen at, in place of the job's `address`.

    It is `address` itself unless only this host resolves that name to loopback. Then it is the
    address of the interface that one of :data:`INTERFACES` names, if one does.
    """
    try:
        _, socket_address = _resolved(address, 0)
    except OSError:
        return address
    return (_chosen() or address) if _only_here(address, socket_address) else address


def is_loopback(address: str) -> bool:
    """Whether an address is loopback, or a name resolves to loopback."""
    try:
        _, socket_address = _resolved(address, 0)
    except OSError:
        return False
    return ipaddress.ip_address(socket_address[0]).is_loopback


def is_here(host: str) -> bool:
    """Whether a name or address belongs to this host."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, (address, *_) in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((address, 0))
                return True
    return False


def loopback_hint(address: str) -> str:
    """Return the end of an error message about hosts that do not meet at `address`. It asks for
    another address if `address` is loopback on this host; otherwise it is ""."""
    local = local_address(address)
    if not is_loopback(local):
        return ""
    number = _resolved(local, 0)[1][0]
    what = "loopback" if number == address else number
    return (
        f"; {address} is {what} on this host, which other hosts cannot reach: pass this "
        "host's address in the nodes' network"
    )


def listen(address: str, port: int, what: str, report: Report) -> socket.socket | None:
    """Make a socket that listens at `address` only. Port 0 means any free port.

    The socket listens at :func:`local_address`. If that differs from `address`, `report` gets a
    message, as peers may resolve the name differently. `what`: name of the listener, for messages.
    Return None if torch has to listen instead, on all interfaces. `report` then gets a message in
    two cases: `address` is not this host's but leads to it (a service), or only this host resolves
    the name to loopback and no interface is named. In other cases torch reports an error. Raises
    OSError if the port is in use.
    """
    local = local_address(address)
    try:
        made = _bound(address, local, port, what, report)
    except _NotHere:
        report(
            f"{address} is not an address of this host: {what} listens on all interfaces; "
            "pass an address of this host to listen only on that"
        )
        return None
    if made is not None and local != address:
        report(f"{address} is loopback on this host: {what} listens at {local}, by {_VARIABLES}")
    return made


def listen_beside(address: str, port: int, what: str, report: Report) -> tuple[socket.socket, str]:
    """Make a socket at a free port of this host. Return the socket and its address, which all peers
    that can reach address:port can reach too.

    If `address` is this host's, the socket listens there, as with :func:`listen`; otherwise it
    listens at the interface that leads to address:port. If only this host resolves `address` to
    loopback and no interface is named, the socket listens on all interfaces and `report` gets a
    message. Raises OSError.
    """
    local = local_address(address)
    with contextlib.suppress(_NotHere):
        here = _bound(address, local, 0, what, report)
        if here is not None:
            return here, local
    own = own_address(address, port)
    number = ipaddress.ip_address(own)
    family = socket.AF_INET if number.version == 4 else socket.AF_INET6
    if number.is_loopback:
        return socket.create_server(("", 0), family=family, backlog=BACKLOG), address
    return socket.create_server((own, 0), family=family, backlog=BACKLOG), own


def own_address(address: str, port: int) -> str:
    """Return the address of this host on the route to address:port. Raises OSError."""
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(socket_address)  # for UDP, connecting sends nothing
        own: str = probe.getsockname()[0]
    return own


class _NotHere(Exception):
    """Raised if an address does not belong to this host."""


def _bound(address: str, local: str, port: int, what: str, report: Report) -> socket.socket | None:
    """Make a socket that listens at `local`, the local address of `address`. Return None if torch
    has to listen instead. It then listens on all interfaces (`report` gets a message), or fails
    with its own error. Raises :class:`_NotHere` if `local` does not belong to this host."""
    try:
        family, socket_address = _resolved(local, port)
    except OSError:
        return None
    if _only_here(local, socket_address):
        report(
            f"{address} is {socket_address[0]} on this host, which other hosts cannot reach: "
            f"{what} listens on all interfaces; set {_VARIABLES} to the nodes' network"
        )
        return None
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(socket_address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise
        if error.errno == errno.EADDRNOTAVAIL:
            raise _NotHere from None
        return None
    return made


def _resolved(address: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Return the family and the socket address of address:port. Raises OSError."""
    family, _, _, _, socket_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return family, socket_address


def _only_here(address: str, socket_address: tuple[Any, ...]) -> bool:
    """Whether only this host resolves the name `address` to the loopback `socket_address`."""
    return ipaddress.ip_address(socket_address[0]).is_loopback and address not in (
        socket_address[0],
        "localhost",
    )


def _chosen() -> str | None:
    """Return the IPv4 address of the first existing interface that the environment names."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for variable in INTERFACES:
            for name in os.environ.get(variable, "").removeprefix("=").split(","):
                with contextlib.suppress(OSError):  # no such interface, or no address
                    request = struct.pack("40s", name.encode()[:15])
                    return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    return None
