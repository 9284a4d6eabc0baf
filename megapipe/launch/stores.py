"""Connections to torch's key-value store over TCP, which do not wait for ever."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from typing import TYPE_CHECKING

from megapipe.util.answers import NoAnswer, call_with_timeout

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ANSWER_S = 10.0
"""How long the store may take to answer once its port takes connections, unless less is said."""

LOOKUP_S = 60.0
"""Most time that look-ups of names are given."""


class _NameLookup:
    """A look-up of the name of an address, in a thread: as long as torch's own take."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._began = time.monotonic()
        self._took: float | None = None
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        with contextlib.suppress(OSError, UnicodeError):
            socket.getnameinfo(socket.getaddrinfo(self._address, 0)[0][4][:2], 0)
        self._took = time.monotonic() - self._began

    def allowance(self) -> float:
        """Return the seconds that two look-ups may take, by how long this one has taken so far."""
        took = time.monotonic() - self._began if self._took is None else self._took
        return min(2 * took, LOOKUP_S)


def open_tcp_store(
    address: str,
    port: int,
    timeout_s: float,
    *,
    world: int | None = None,
    hosts: bool = False,
    listening: socket.socket | None = None,
    answer_s: float | None = None,
) -> TCPStore:
    """The store at address:port; one that `hosts` runs it, on the socket `listening` if it is
    given, of which it takes possession.

    `timeout_s` is that of later calls, `answer_s` how long the store may take to answer, besides
    what the name server takes: torch asks it for the names of both ends. torch's client would wait
    for ever for the answer of a port that something else listens on. Raises :class:`NoAnswer`, and
    what torch raises: RuntimeError, ValueError.
    """
    from torch.distributed import TCPStore

    def connect() -> TCPStore:
        return TCPStore(
            address,
            port,
            world,
            is_master=hosts,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )

    more = _NameLookup(address).allowance
    try:
        return call_with_timeout(ANSWER_S if answer_s is None else answer_s, connect, more=more)
    except NoAnswer:
        raise NoAnswer("what listens there is no rendezvous store") from None
