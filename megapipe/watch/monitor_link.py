"""Links between the monitors of several nodes: all report to one monitor, which returns the
verdict.

Monitors use their own connections, with lines of JSON, because the rendezvous store may be in a
rank that is suspended. Whoever connects has to know a secret that ranks have shared through that
store. If a monitor is silent, the monitor at the other end of the link keeps its newest report, and
the ranks of the silent monitor's node count as lost.
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

from megapipe.watch.hang_diagnosis import RankView
from megapipe.watch.journal import JournalState

EVERY_S = 1.0
"""Seconds between two messages of a monitor."""
SILENT_S = 5.0
"""Seconds without a message after which the other monitor counts as lost."""
RECONNECT_S = 0.5
"""Timeout in seconds of a new attempt to reach a lost monitor; short, as ranks need watching."""
LONGEST = 1 << 24
"""Maximum size of a message, which is one line, in bytes."""


class MonitorServer:
    """The deciding monitor's end of all links. `listens`: descriptor of a listening socket.
    `token`: secret that other monitors must know."""

    def __init__(self, listens: int, token: str) -> None:
        self._token = token
        self._listens = socket.socket(fileno=listens)
        self._lock = threading.Lock()
        self._reports: dict[bytes, _Report] = {}
        """Newest message of each other monitor, by the monitor's random name."""
        self._verdict: str | None = None
        self._answer = _message(None, {})
        threading.Thread(target=self._accept, daemon=True).start()

    def look(self, seconds: float) -> None:
        """Add `seconds`, the time since the last call, to the age of all messages."""
        with self._lock:
            for report in self._reports.values():
                report.age_s += seconds

    def views(self) -> dict[int, RankView]:
        """Return the views of the other nodes' ranks."""
        with self._lock:
            return {
                rank: view
                for report in self._reports.values()
                for rank, view in report.now().items()
            }

    def set_answer(self, verdict: str | None, own: Mapping[int, RankView]) -> None:
        """Set the answer to other monitors: the verdict, and the views of this node's ranks."""
        self._answer = _message(verdict, own)
        self._verdict = verdict

    @property
    def is_asked(self) -> bool:
        """Whether any other monitor still reports to this one."""
        with self._lock:
            return any(report.is_current for report in self._reports.values())

    @property
    def was_asked(self) -> bool:
        """Whether any other monitor has ever reported to this one."""
        with self._lock:
            return bool(self._reports)

    def await_all(self) -> None:
        """Wait until all connected monitors have received the verdict, at most SILENT_S seconds."""
        until = time.monotonic() + SILENT_S
        while self.is_asked and time.monotonic() < until:
            time.sleep(0.05)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listens.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(SILENT_S)
        report: _Report | None = None
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
                    report = self._reports[name] = _Report(views)
                over = self._verdict is not None
                connection.sendall(self._answer)
                if over:
                    break
        if report is not None:  # a new connection of the same monitor is not affected
            report.ended = True


class MonitorClient:
    """The reporting monitor's end of its link to the deciding monitor at `address`."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._address = address
        self._greeting = f"{token} {secrets.token_hex(8)}\n".encode()
        self._connection: socket.socket | None = None
        self._report: _Report | None = None
        self._due = 0.0
        """Time of the next message or connection attempt, monotonic seconds."""
        self._connect(SILENT_S)

    def _connect(self, seconds: float) -> None:
        self._due = time.monotonic() + SILENT_S
        with contextlib.suppress(OSError):
            connection = socket.create_connection(self._address, timeout=seconds)
            connection.sendall(self._greeting)
            self._connection, self._answers = connection, connection.makefile("rb")
            self._due = 0.0

    @property
    def is_connected(self) -> bool:
        """Whether the deciding monitor is connected."""
        return self._connection is not None

    def look(self, seconds: float) -> None:
        """Add `seconds`, the time since the previous call, to the age of the newest message. If the
        deciding monitor is lost, try to reconnect every few seconds. Call this regularly."""
        if self._report is not None:
            self._report.age_s += seconds
        if self._connection is None and time.monotonic() >= self._due:
            self._connect(RECONNECT_S)

    def views(self) -> dict[int, RankView]:
        """Return the views of the ranks on the deciding monitor's node."""
        return {} if self._report is None else self._report.now()

    def exchange(self, views: Mapping[int, RankView], *, at_once: bool = False) -> str | None:
        """Report the views of this node's ranks if a message is due, or at once if there is news.
        Return the verdict, if there is one."""
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
            if self._report is not None:
                self._report.ended = True
            return None
        self._connection.settimeout(SILENT_S)
        self._report = _Report(others)
        return verdict


class _Report:
    """The newest message of another monitor."""

    def __init__(self, views: Mapping[int, RankView]) -> None:
        self.age_s = 0.0
        """Seconds that this process has run since the message; times of suspension do not count."""
        self.ended = False
        """Whether the connection has ended."""
        self._views = views

    @property
    def is_current(self) -> bool:
        return not self.ended and self.age_s < SILENT_S

    def now(self) -> dict[int, RankView]:
        """Return the views of the message, with the seconds since its arrival added."""
        seconds, lost = self.age_s, not self.is_current
        return {
            rank: view._replace(
                still_s=view.still_s + seconds, beatless_s=view.beatless_s + seconds, unheard=lost
            )
            for rank, view in self._views.items()
        }


def _message(verdict: str | None, views: Mapping[int, RankView]) -> bytes:
    """Encode a message as a line of JSON."""
    encoded = {rank: [[*view.state], *view[1:]] for rank, view in views.items()}
    return f"{json.dumps([verdict, encoded])}\n".encode()


def _read(line: bytes) -> tuple[str | None, dict[int, RankView]]:
    """Decode the verdict and the views of a message. Raises ValueError for any other `line`."""
    try:
        verdict, encoded = json.loads(line)
        views = {
            int(rank): RankView(JournalState(*state), *rest)
            for rank, (state, *rest) in encoded.items()
        }
    except TypeError:
        raise ValueError("the other monitor has another version of this file") from None
    return verdict, views
