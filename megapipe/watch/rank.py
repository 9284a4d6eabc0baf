"""A rank's part in being watched: its journal, its heart, and the monitor, if it starts that."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol

from megapipe.errors import LaunchError
from megapipe.util.beneath import open_no_symlinks
from megapipe.util.lived import LivedTime, await_keys
from megapipe.util.processes import machine
from megapipe.watch.journal import BEATS, LOST, PREFIX, Journal
from megapipe.watch.journal import VERDICT as TOLD
from megapipe.watch.monitor import STACKS, VERDICT, Settings

BEAT_S = 0.25
"""Time between two beats of the heart."""
WATCHED_S = 2.0
"""How much later than a monitor ranks, communication and the store notice that nobody answers."""


Listen = Callable[[], tuple[socket.socket, str]]
"""Makes a socket that listens, and tells the name by which other machines reach its host."""


class KeyValueStore(Protocol):
    """Keys and values that all ranks see."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None: ...


class RankWatch:
    """This rank, as a monitor of its node watches it.

    The first rank of a machine starts the monitor; the first of the job has it listen to those of
    other machines, at what `listen` makes. A rank that has waited for
    others for `limit_s` is a hang: `end` is then called in a thread with a line that says who is to
    blame, or, two seconds later, that no monitor has said so. Stacks of all ranks, and their
    `flight_record` if there is one, are written into a folder of `reports`.
    """

    def __init__(
        self,
        store: KeyValueStore,
        rank: int,
        limit_s: float,
        reports: Path,
        *,
        listen: Listen | None,
        flight_record: Callable[[], bytes | None],
        end: Callable[[str], object],
    ) -> None:
        self.journal = Journal()
        self._rank = rank
        self._limit_s = limit_s
        self._flight_record = flight_record
        self._end = end
        self._over = threading.Event()
        self._folder, self._monitor = _join(store, rank, limit_s, reports, listen)
        self._stacks: IO[Any] = open(self._folder / f"{PREFIX}{rank}.stacks", "w")  # noqa: SIM115
        faulthandler.register(STACKS, self._stacks, all_threads=True)
        self.journal.publish(self._folder, rank)  # from here on the monitor sends that signal
        threading.Thread(target=self._beat, daemon=True).start()

    def close(self) -> None:
        """Be watched no more: this rank leaves the job."""
        self.journal.withdraw()
        self._over.set()

    def lost_contact(self) -> bool:
        """Tell the monitor that contact with another rank is lost, which it may name by `end`;
        returns whether there is a monitor."""
        self.journal.words[LOST] = 1
        return not self._over.is_set()

    def _beat(self) -> None:
        words = self.journal.words
        clock, noted = LivedTime(), self.journal.waits()
        while not self._over.wait(BEAT_S):
            words[BEATS] += 1
            before, noted = noted, self.journal.waits()
            if noted is None or noted != before:
                clock = LivedTime()
            elif clock.look() >= self._limit_s + WATCHED_S:  # communication waits for longer
                self._end(
                    f"rank {self._rank} has waited for others for {self._limit_s:g} s "
                    "(parallel.timeout_s), and no process that watches says for whom"
                )
                return
            if words[TOLD]:
                verdict, report = json.loads((self._folder / VERDICT).read_text())
                with contextlib.suppress(OSError, RuntimeError, ValueError):  # the verdict is more
                    self._write_flight_record(report)
                time.sleep(2 * BEAT_S)  # when one ends the others do, and these too have to write
                self._end(verdict)
                return

    def _write_flight_record(self, report: str | None) -> None:
        flight = self._flight_record() if report is not None else None
        if report is not None and flight is not None:
            with open_no_symlinks(Path(report), f"{PREFIX}{self._rank}.flight.json", "wb") as file:
                file.write(flight)


def _join(
    store: KeyValueStore, rank: int, limit_s: float, reports: Path, listen: Listen | None
) -> tuple[Path, subprocess.Popen[bytes] | None]:
    """The folder of this machine's journals, and their monitor, if it was started here."""
    key = f"watch/{machine()}"
    first = int(store.compare_set(key, "", str(rank)))
    if first != rank:
        folder = Path(_said_by(first, store, f"{key}/folder", limit_s))
        if folder.is_dir():  # else a container with files of its own
            return folder, None
    folder = Path(tempfile.mkdtemp(prefix="megapipe-watch-"))
    settings = Settings(str(folder), limit_s, str(reports.absolute()), os.getpid())
    listening = None
    if listen is not None:
        settings, listening = _with_others(store, rank, settings, listen)
    monitor = _start(settings, listening)
    store.set(f"{key}/folder", str(folder))
    return folder, monitor


def _with_others(
    store: KeyValueStore, rank: int, settings: Settings, listen: Listen
) -> tuple[Settings, socket.socket | None]:
    """The settings with which the monitors of several machines find each other, and the socket at
    which the first of them listens."""
    first = int(store.compare_set("watch/hub", "", str(rank)))
    if first == rank:
        listening, host = listen()
        token = secrets.token_hex(16)
        store.set("watch/address", json.dumps([host, listening.getsockname()[1], token]))
        return settings._replace(listens=listening.fileno(), token=token), listening
    host, port, token = json.loads(_said_by(first, store, "watch/address", settings.limit_s))
    return settings._replace(hub=(host, port), token=token), None


def _said_by(rank: int, store: KeyValueStore, key: str, limit_s: float) -> str:
    """The value that a rank sets in the store; raises :class:`LaunchError` if it does not."""
    try:
        await_keys(store, [key], limit_s)
    except RuntimeError:
        store.check([key])  # which raises where the store is lost
        raise LaunchError(
            f"rank {rank} has taken more than {limit_s:.0f} s to start a process that watches "
            "its node (parallel.timeout_s): look how it ended"
        ) from None
    return store.get(key).decode()


def _start(settings: Settings, listening: socket.socket | None) -> subprocess.Popen[bytes]:
    """Start a monitor, and hand it the socket; its settings are nothing for lists of processes."""
    package = Path(__file__).resolve().parents[2]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environ.pop("RANK", None)  # it is none
    monitor = subprocess.Popen(
        [sys.executable, "-m", "megapipe.watch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environ,
        pass_fds=() if listening is None else [listening.fileno()],
    )
    assert monitor.stdin is not None
    with monitor.stdin:
        monitor.stdin.write(json.dumps(settings._asdict()).encode())
    if listening is not None:
        listening.close()
    return monitor
