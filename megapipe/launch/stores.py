"""Connections to torch's TCP store that do not wait for ever."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from typing import TYPE_CHECKING

from megapipe.util.timeouts import NoAnswer, call_with_timeout

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ANSWER_S = 10.0
"""Default time in seconds that the store may take to answer once its port accepts connections."""

LOOKUP_S = 60.0
"""Maximum time that is allowed for name look-ups, in seconds."""


class _NameLookup:
    """A name look-up of an address, in a thread, to learn how long a look-up by torch takes."""

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
        """Return the seconds that two look-ups of torch may take, judged by this one so far."""
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
    """Connect to the store at address:port. If `hosts` is true, this process runs the store; the
    store takes over the socket `listening`, if one is passed.

    `timeout_s` limits later requests. `answer_s` limits the wait for the store's first answer; the
    time of torch's two name look-ups is added. Without `answer_s`, torch's client would wait for
    ever if another program listens at the port. Raises :class:`NoAnswer`, and torch's RuntimeError
    and ValueError.
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
        raise NoAnswer("another program listens there, not a rendezvous store") from None
