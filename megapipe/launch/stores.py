"""Connections to torch's key-value store over TCP, which do not wait for ever."""

from __future__ import annotations

import datetime
import socket
from typing import TYPE_CHECKING

from megapipe.answers import Mute, within

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ANSWER_S = 10.0
"""How long the store may take to answer once its port takes connections, unless less is said."""


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

    `timeout_s` is that of later calls, `answer_s` how long the store may take to answer. torch's
    client would wait for ever for the answer of a port that something else listens on. Raises
    :class:`Mute`, and what torch raises: RuntimeError, ValueError.
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

    try:
        return within(ANSWER_S if answer_s is None else answer_s, connect)
    except Mute:
        raise Mute("what listens there is no rendezvous store") from None
