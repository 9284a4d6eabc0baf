"""Monitors of several nodes: all tell one what they see, and it tells them the verdict.

They talk over connections of their own, in lines of JSON, because the rendezvous store may be in
a rank that is stopped. Who connects has to know a word that ranks have shared through that store.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from megapipe.watch.culprit import View
from megapipe.watch.journal import State

EVERY_S = 1.0
"""Time between two messages."""
SILENT_S = 5.0
"""How long one may hear nothing of the other before it counts as lost."""
LONGEST = 1 << 24
"""Bytes of a line."""


class Hub:
    """The monitor that decides: `listens` is the descriptor of a socket, `token` the word."""

    def __init__(self, listens: int, token: str) -> None:
        self._token = token
        self._listens = socket.socket(fileno=listens)
        self._lock = threading.Lock()
        self._seen: dict[int, tuple[float, Mapping[int, View]]] = {}
        """The time and the content of the last message of each connection."""
        self._verdict: str | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def views(self) -> dict[int, View]:
        """The ranks of the other nodes."""
        found: dict[int, View] = {}
        now = time.monotonic()
        with self._lock:
            for when, views in self._seen.values():
                if now - when < SILENT_S:
                    found |= {rank: _older(view, now - when) for rank, view in views.items()}
        return found

    def tell(self, verdict: str) -> None:
        """Answer the monitors with the verdict from now on."""
        self._verdict = verdict

    def await_all(self) -> None:
        """Wait until all have heard it, for as long as they are there to hear."""
        until = time.monotonic() + SILENT_S
        while self._seen and time.monotonic() < until:
            time.sleep(0.05)

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                connection, _ = self._listens.accept()
            except OSError:
                return
            number += 1
            threading.Thread(target=self._hear, args=(number, connection), daemon=True).start()

    def _hear(self, number: int, connection: socket.socket) -> None:
        connection.settimeout(SILENT_S)
        with (
            contextlib.suppress(OSError, ValueError),
            connection,
            connection.makefile("rb") as file,
        ):
            if not hmac.compare_digest(file.readline(200).strip(), self._token.encode()):
                return
            while line := file.readline(LONGEST):
                with self._lock:
                    self._seen[number] = time.monotonic(), _views(json.loads(line))
                answer = self._verdict
                connection.sendall((json.dumps(answer) + "\n").encode())
                if answer is not None:
                    break
        with self._lock:
            self._seen.pop(number, None)


class Spoke:
    """A monitor that tells the one at `address` what it sees."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._connection: socket.socket | None = None
        self._last = 0.0
        with contextlib.suppress(OSError):
            self._connection = socket.create_connection(address, timeout=SILENT_S)
            self._connection.sendall(f"{token}\n".encode())
            self._answers = self._connection.makefile("rb")

    @property
    def is_heard(self) -> bool:
        """Whether the other has answered so far."""
        return self._connection is not None

    def exchange(self, views: Mapping[int, View]) -> str | None:
        """Tell what is to be seen here, now and then; returns the verdict, if there is one."""
        assert self._connection is not None
        if time.monotonic() < self._last + EVERY_S:
            return None
        self._last = time.monotonic()
        try:
            text = json.dumps({rank: [[*view.state], *view[1:]] for rank, view in views.items()})
            self._connection.sendall(f"{text}\n".encode())
            line = self._answers.readline(LONGEST)
            verdict: str | None = json.loads(line)
        except (OSError, ValueError):
            self._connection.close()
            self._connection = None
            return None
        return verdict


def _views(told: Mapping[str, Any]) -> dict[int, View]:
    """Views out of what JSON makes of them."""
    return {int(rank): View(State(*state), *rest) for rank, (state, *rest) in told.items()}


def _older(view: View, seconds: float) -> View:
    """A view after so many seconds in which nothing was heard."""
    return view._replace(still_s=view.still_s + seconds, beatless_s=view.beatless_s + seconds)
