"""A rank's side of hang detection: its journal, its heartbeat, and the monitor that it starts."""

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
from megapipe.util.lived import LivedTime, await_keys
from megapipe.util.no_symlinks import open_no_symlinks
from megapipe.util.processes import machine
from megapipe.watch.journal import BEATS, LOST, PREFIX, Journal
from megapipe.watch.journal import VERDICT as VERDICT_FOUND
from megapipe.watch.monitor import STACKS, VERDICT, Settings

BEAT_S = 0.25
"""Seconds between two heartbeats."""
WATCHED_S = 2.0
"""Seconds by which timeouts of ranks, process groups and the store exceed a monitor's limit."""


Listen = Callable[[], tuple[socket.socket, str]]
"""Function that returns a new listening socket, and this host's name for other machines."""


class KeyValueStore(Protocol):
    """A store of keys and values that all ranks see."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta, /) -> None: ...


class RankWatch:
    """This rank, watched by the monitor of its node.

    The first rank of a machine starts the monitor. With several machines, the monitor that starts
    first listens for the other monitors, on a socket that `listen` makes. There is a hang if a rank
    has waited for others for `limit_s` seconds. Then `end` is called in a thread, with a line that
    names the rank at fault. If no monitor names one, `end` is called two seconds later with a line
    that says so. Stacks of all ranks, and the results of `flight_record` if there are any, are
    written into a new folder in `reports`.
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
        self.journal.publish(self._folder, rank)  # from here on the monitor may send STACKS
        threading.Thread(target=self._beat, daemon=True).start()

    def close(self) -> None:
        """Stop the watch, because this rank leaves the job."""
        self.journal.withdraw()
        self._over.set()

    def lost_contact(self) -> bool:
        """Inform the monitor that contact with some rank is lost, so that it may name that rank
        through `end`. Return whether this rank is still watched."""
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
            elif clock.look() >= self._limit_s + WATCHED_S:  # communication waits longer
                self._end(
                    f"rank {self._rank} has waited for other ranks for {self._limit_s:g} s "
                    "(parallel.timeout_s), and no monitor says for which"
                )
                return
            if words[VERDICT_FOUND]:
                verdict, report = json.loads((self._folder / VERDICT).read_text())
                with contextlib.suppress(OSError, RuntimeError, ValueError):  # verdict first
                    self._write_flight_record(report)
                time.sleep(2 * BEAT_S)  # if a rank ends, the others do: let them write first
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
    """Return the folder of this machine's journals, and the monitor if this rank starts it."""
    key = f"watch/{machine()}"
    first = int(store.compare_set(key, "", str(rank)))
    if first != rank:
        folder = Path(_value_from(first, store, f"{key}/folder", limit_s))
        if folder.is_dir():  # else the ranks are in different containers
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
    """Return settings with which the monitors of several machines find each other, and the socket
    if the monitor of this rank is the one that listens."""
    first = int(store.compare_set("watch/hub", "", str(rank)))
    if first == rank:
        listening, host = listen()
        token = secrets.token_hex(16)
        store.set("watch/address", json.dumps([host, listening.getsockname()[1], token]))
        return settings._replace(listens=listening.fileno(), token=token), listening
    host, port, token = json.loads(_value_from(first, store, "watch/address", settings.limit_s))
    return settings._replace(hub=(host, port), token=token), None


def _value_from(rank: int, store: KeyValueStore, key: str, limit_s: float) -> str:
    """Wait for the value that `rank` sets in the store. Raises :class:`LaunchError` if late."""
    try:
        await_keys(store, [key], limit_s)
    except RuntimeError:
        store.check([key])  # raises if the store is lost
        raise LaunchError(
            f"rank {rank} did not start the monitor of its node within {limit_s:.0f} s "
            "(parallel.timeout_s): look at its output"
        ) from None
    return store.get(key).decode()


def _start(settings: Settings, listening: socket.socket | None) -> subprocess.Popen[bytes]:
    """Start a monitor with the socket. Pass it the settings on stdin, which process lists hide."""
    package = Path(__file__).resolve().parents[2]
    paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environ.pop("RANK", None)  # the monitor is not a rank
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
