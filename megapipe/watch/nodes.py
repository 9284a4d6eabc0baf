"""Monitors of several nodes: all tell one what they see, and it tells them the verdict.

They talk over connections of their own, in lines of JSON, because the rendezvous store may be in
a rank that is stopped. Who connects has to know a word that ranks have shared through that store.
Where one is heard no more, the other keeps what it has told last: with its node its ranks are lost.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Mapping

from megapipe.watch.culprit import RankView
from megapipe.watch.journal import JournalState

EVERY_S = 1.0
"""Time between two messages."""
SILENT_S = 5.0
"""How long one may hear nothing of the other before it counts as lost."""
AGAIN_S = 0.5
"""How long one that is lost may take to answer when it is tried again; ranks wait to be seen."""
LONGEST = 1 << 24
"""Bytes of a line."""


class MonitorServer:
    """The monitor that decides: `listens` is the descriptor of a socket, `token` the word."""

    def __init__(self, listens: int, token: str) -> None:
        self._token = token
        self._listens = socket.socket(fileno=listens)
        self._lock = threading.Lock()
        self._told: dict[bytes, _Told] = {}
        """The last message of each monitor."""
        self._verdict: str | None = None
        self._answer = _message(None, {})
        threading.Thread(target=self._accept, daemon=True).start()

    def look(self, seconds: float) -> None:
        """To be called now and then, so many seconds after the last time."""
        with self._lock:
            for told in self._told.values():
                told.age_s += seconds

    def views(self) -> dict[int, RankView]:
        """The ranks of the other nodes."""
        with self._lock:
            return {rank: view for told in self._told.values() for rank, view in told.now().items()}

    def tell(self, verdict: str | None, own: Mapping[int, RankView]) -> None:
        """Answer the other monitors with the verdict, and the ranks of this node, from now on."""
        self._answer = _message(verdict, own)
        self._verdict = verdict

    @property
    def is_asked(self) -> bool:
        """Whether there are monitors that are to be answered."""
        with self._lock:
            return any(told.is_heard for told in self._told.values())

    @property
    def was_asked(self) -> bool:
        """Whether any other monitor has been heard so far."""
        with self._lock:
            return bool(self._told)

    def await_all(self) -> None:
        """Wait until all have heard the verdict, for as long as they are there to hear."""
        until = time.monotonic() + SILENT_S
        while self.is_asked and time.monotonic() < until:
            time.sleep(0.05)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listens.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(connection,), daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        connection.settimeout(SILENT_S)
        told: _Told | None = None
        with (
            contextlib.suppress(OSError, ValueError),
            connection,
            connection.makefile("rb") as file,
        ):
            token, _, name = file.readline(200).strip().rpartition(b" ")
            if not hmac.compare_digest(token, self._token.encode()):
                return
            while line := file.readline(LONGEST):
                _, views = _read(line)
                with self._lock:
                    told = self._told[name] = _Told(views)
                over = self._verdict is not None
                connection.sendall(self._answer)
                if over:
                    break
        if told is not None:  # of which there may be a new connection by now
            told.ended = True


class MonitorClient:
    """A monitor that tells the one at `address` what it sees."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._address = address
        self._greeting = f"{token} {secrets.token_hex(8)}\n".encode()
        self._connection: socket.socket | None = None
        self._told: _Told | None = None
        self._due = 0.0
        """When to tell it something, or to try again, monotonic seconds."""
        self._connect(SILENT_S)

    def _connect(self, seconds: float) -> None:
        self._due = time.monotonic() + SILENT_S
        with contextlib.suppress(OSError):
            connection = socket.create_connection(self._address, timeout=seconds)
            connection.sendall(self._greeting)
            self._connection, self._answers = connection, connection.makefile("rb")
            self._due = 0.0

    @property
    def is_heard(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def look(self, seconds: float) -> None:
        """To be called now and then, so many seconds after the last time; tries now and then to
        reach one that is lost."""
        if self._told is not None:
            self._told.age_s += seconds
        if self._connection is None and time.monotonic() >= self._due:
            self._connect(AGAIN_S)

    def views(self) -> dict[int, RankView]:
        """The ranks of the other's node."""
        return {} if self._told is None else self._told.now()

    def exchange(self, views: Mapping[int, RankView], *, at_once: bool = False) -> str | None:
        """Tell what is to be seen here, now and then, or at once where it is news; returns the
        verdict, if there is one."""
        assert self._connection is not None
        news = at_once or any(view.state.lost_contact for view in views.values())
        if time.monotonic() < self._due and not news:
            return None
        self._due = time.monotonic() + EVERY_S
        try:
            self._connection.sendall(_message(None, views))
            verdict, others = _read(self._answers.readline(LONGEST))
        except (OSError, ValueError):
            self._connection.close()
            self._connection = None
            self._due = time.monotonic() + SILENT_S
            if self._told is not None:
                self._told.ended = True
            return None
        self._connection.settimeout(SILENT_S)
        self._told = _Told(others)
        return verdict


class _Told:
    """The last message of a monitor."""

    def __init__(self, views: Mapping[int, RankView]) -> None:
        self.age_s = 0.0
        """Seconds in which this process has run since: it may have been suspended with the job."""
        self.ended = False
        """Whether its connection has."""
        self._views = views

    @property
    def is_heard(self) -> bool:
        return not self.ended and self.age_s < SILENT_S

    def now(self) -> dict[int, RankView]:
        """The views after the time in which nothing was heard."""
        seconds, lost = self.age_s, not self.is_heard
        return {
            rank: view._replace(
                still_s=view.still_s + seconds, beatless_s=view.beatless_s + seconds, unheard=lost
            )
            for rank, view in self._views.items()
        }


def _message(verdict: str | None, views: Mapping[int, RankView]) -> bytes:
    """A line of JSON."""
    told = {rank: [[*view.state], *view[1:]] for rank, view in views.items()}
    return f"{json.dumps([verdict, told])}\n".encode()


def _read(line: bytes) -> tuple[str | None, dict[int, RankView]]:
    """The verdict and the views of a message; raises ValueError if it is none."""
    try:
        verdict, told = json.loads(line)
        views = {
            int(rank): RankView(JournalState(*state), *rest)
            for rank, (state, *rest) in told.items()
        }
    except TypeError:
        raise ValueError("another version of this file is at work there") from None
    return verdict, views
