"""Where a job listens for its peers: at the address that they use, not on all interfaces."""

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
"""Connections that may wait to be taken, as many as the system allows."""
INTERFACES = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""Environment variables that name the interface of the network between the nodes."""
STORE = "the rendezvous store"
_VARIABLES = " or ".join(INTERFACES)
_SIOCGIFADDR = 0x8915
"""Linux' request for the IPv4 address of an interface."""

Tell = Callable[[str], object]
"""Takes a line for the user."""


def local_address(address: str) -> str:
    """The address by which processes of this host reach what listens at `address` here.

    Where that is a name that this host, but no other one, knows as itself, it is the address of the
    interface that one of :data:`INTERFACES` names; else `address`.
    """
    try:
        _, place = _resolved(address, 0)
    except OSError:
        return address
    return (_chosen() or address) if _only_here(address, place) else address


def is_loopback(address: str) -> bool:
    """Whether an address, or the one of a name, is of the loopback interface."""
    try:
        _, place = _resolved(address, 0)
    except OSError:
        return False
    return ipaddress.ip_address(place[0]).is_loopback


def is_here(host: str) -> bool:
    """Whether a name or address is this host's."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, (address, *_) in socket.getaddrinfo(
            host, 0, type=socket.SOCK_STREAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind((address, 0))
                return True
    return False


def loopback_hint(address: str) -> str:
    """Say what to give in the place of an address that is loopback on this host, as the end of an
    error of hosts that do not meet there; empty where it is not."""
    home = local_address(address)
    if not is_loopback(home):
        return ""
    number = _resolved(home, 0)[1][0]
    what = "loopback" if number == address else number
    return (
        f"; {address} is {what} on this host, where no other host gets: give the address of that "
        "host in the nodes' network"
    )


def listen(address: str, port: int, what: str, tell: Tell) -> socket.socket | None:
    """A socket that listens at `address` and no other one of this host; port 0: any that is free.

    It is at :func:`local_address` of the address. None where torch has to listen on all interfaces,
    and `tell` is given a line that says so of `what` listens: the address is another's that leads
    here, as that of a service, or a name that this host, but no other one, knows as itself, and no
    interface is named. Where one is, the line says at which address, as others may look for that
    name at another. None, without a line, also for what torch will tell. Raises OSError where the
    port is taken.
    """
    home = local_address(address)
    try:
        made = _bound(address, home, port, what, tell)
    except _NotHere:
        tell(
            f"{address} is no address of this host: {what} listens on all interfaces; give one of "
            "its addresses to have it listen there alone"
        )
        return None
    if made is not None and home != address:
        tell(f"{address} is loopback on this host: {what} listens at {home}, by {_VARIABLES}")
    return made


def listen_beside(address: str, port: int, what: str, tell: Tell) -> tuple[socket.socket, str]:
    """A socket at any free port of this host, and the name of the host for those who reach
    address:port.

    It is where :func:`listen` would listen if `address` is here, else at the interface by which
    address:port is reached; at all of them, of which `tell` is given a line, where this host, but
    no other one, knows `address` as itself and no interface is named. Raises OSError.
    """
    home = local_address(address)
    with contextlib.suppress(_NotHere):
        here = _bound(address, home, 0, what, tell)
        if here is not None:
            return here, home
    own = own_address(address, port)
    number = ipaddress.ip_address(own)
    family = socket.AF_INET if number.version == 4 else socket.AF_INET6
    if number.is_loopback:
        return socket.create_server(("", 0), family=family, backlog=BACKLOG), address
    return socket.create_server((own, 0), family=family, backlog=BACKLOG), own


def own_address(address: str, port: int) -> str:
    """Return the address of this host on the way to address:port. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        own: str = probe.getsockname()[0]
    return own


class _NotHere(Exception):
    """An address is none of this host's."""


def _bound(address: str, home: str, port: int, what: str, tell: Tell) -> socket.socket | None:
    """As :func:`listen`, at `home`, which is what `address` is at home; raises :class:`_NotHere`
    where that is an address of others."""
    try:
        family, place = _resolved(home, port)
    except OSError:
        return None
    if _only_here(home, place):
        tell(
            f"{address} is {place[0]} on this host, which others do not reach: {what} listens on "
            f"all interfaces; set {_VARIABLES} to that of the nodes' network"
        )
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
        if error.errno == errno.EADDRNOTAVAIL:
            raise _NotHere from None
        return None
    return made


def _resolved(address: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """The family and the numbers of address:port. Raises OSError."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return family, place


def _only_here(address: str, place: tuple[Any, ...]) -> bool:
    """Whether an address, which is at `place` here, is a name by which others do not get here."""
    return ipaddress.ip_address(place[0]).is_loopback and address not in (place[0], "localhost")


def _chosen() -> str | None:
    """The IPv4 address of the first interface that the environment names and that is here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for variable in INTERFACES:
            for name in os.environ.get(variable, "").removeprefix("=").split(","):
                with contextlib.suppress(OSError):  # no such interface, or none with an address
                    request = struct.pack("40s", name.encode()[:15])
                    return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    return None
