"""Connections to torch's key-value store over TCP, which do not wait for ever."""

from __future__ import annotations

import datetime
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ANSWER_S = 10.0
"""How long the store may take to answer once its port takes connections."""
T = TypeVar("T")


class Mute(TimeoutError):
    """A port takes connections, and nothing answers there as a store does."""


def open_tcp_store(
    address: str,
    port: int,
    timeout_s: float,
    *,
    world: int | None = None,
    hosts: bool = False,
    listening: socket.socket | None = None,
) -> TCPStore:
    """The store at address:port; one that `hosts` runs it, on the socket `listening` if it is
    given, of which it takes possession.

    `timeout_s` is that of later calls. torch's client would wait for ever for the answer of a port
    that something else listens on. Raises :class:`Mute`, and what torch raises: RuntimeError,
    ValueError.
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
        return within(ANSWER_S, connect)
    except Mute:
        raise Mute("what listens there is no rendezvous store") from None


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of a call that may never return; it is then left behind in its thread.

    Raises :class:`Mute` after `seconds`, and what the call raises.
    """
    made: list[T] = []
    failed: list[Exception] = []

    def act() -> None:
        try:
            made.append(call())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not made:
        raise Mute(f"no answer for {seconds:g} s")
    return made[0]
