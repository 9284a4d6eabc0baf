"""A process of a node that finds ranks which hang: ``python -m megapipe.watch``.

It reads the journals of the node's ranks four times a second, and no rank can hold it up. Where one
has waited for its peers for longer than the limit, or for seconds for one whose process is gone, it
finds out for whom (:mod:`megapipe.watch.culprit`), has all ranks of the node write down their
stacks, and gives the verdict to the ranks, which end by it; those that cannot are killed. Before
the first step it does so where a rank is lost, whoever waits. Of several nodes one monitor decides,
to which the others tell what they see (:mod:`megapipe.watch.nodes`).

It ends when its ranks have ended; where these are gone and no other node has reached it yet, some
seconds later. Signals that a terminal or a launcher sends to all are not for
it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from megapipe.util.beneath import make_folder, write_no_symlinks
from megapipe.util.processes import is_stopped, start_of
from megapipe.watch.culprit import RankView, describe, diagnose
from megapipe.watch.journal import PREFIX, JournalReader
from megapipe.watch.nodes import SILENT_S, MonitorClient, MonitorServer

LOOK_S = 0.25
"""Time between two looks."""
SUSPENDED_S = 1.0
"""The most that counts of it."""
STACKS_S = 0.2
"""How long ranks may take to write down their stacks."""
END_S = 4.0
"""How long ranks may take to end by a verdict; those that cannot hear it are killed when the others
have ended, whose exit code is then that of the job."""
SAY_S = 3.0
"""How long ranks of other nodes may take to tell the store of a verdict that they have heard."""
UNASKED_S = 4.0
"""How long one that other nodes have not reached yet outlives its ranks where these are gone."""
VERDICT = "verdict"
"""The file that has it, and the folder of the report."""
STACKS = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Has a rank write down the stacks of its threads."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Settings(NamedTuple):
    """The monitor's orders."""

    folder: str
    """Where the journals are."""
    limit_s: float
    """How long a rank may wait for others, seconds."""
    reports: str
    """The folder in the run's that gets a folder for each hang."""
    starter: int
    """The process that starts the monitor."""
    listens: int = -1
    """The socket where monitors of other nodes connect, -1 for none."""
    hub: tuple[str, int] | None = None
    """Where another monitor listens."""
    token: str = ""
    """A word that monitors of a job know."""


class _Rank:
    """A rank of this node, as the looks so far show it."""

    def __init__(self, file: Path) -> None:
        self.reader = JournalReader(file)
        self.state = self.reader.read()
        self.began = start_of(self.state.pid)
        self.still_s = 0.0
        self.beatless_s = 0.0
        self._seen: tuple[int, bytes] = (-1, b"")

    def look(self, seconds: float) -> None:
        """Look again, so many seconds after the last time."""
        beats, rest = self.reader.look()
        self.beatless_s = self.beatless_s + seconds if beats == self._seen[0] else 0.0
        self.still_s = self.still_s + seconds if rest == self._seen[1] else 0.0
        if rest != self._seen[1]:
            self.state = self.reader.read()
        self._seen = beats, rest

    @property
    def ended(self) -> bool:
        """Whether it is leaving or gone."""
        return self.state.left or self.gone

    @property
    def gone(self) -> bool:
        """Whether its process has ended without leaving: another may have its number by now."""
        began = start_of(self.state.pid)
        return not self.state.left and (began is None or began != self.began)

    def view(self) -> RankView:
        """Its state, and how it looks from outside."""
        gone = self.gone
        stopped = not gone and is_stopped(self.state.pid)
        host = socket.gethostname()
        return RankView(self.state, self.still_s, self.beatless_s, stopped, host, gone)

    def send(self, number: int) -> None:
        """Send it a signal."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.state.pid, number)


class Monitor:
    """Looks after the ranks that have a journal in ``settings.folder``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._ranks: dict[int, _Rank] = {}
        self._alone_s = 0.0
        """For how long all ranks have ended."""
        self._hub = (
            MonitorServer(settings.listens, settings.token) if settings.listens >= 0 else None
        )
        self._spoke = (
            MonitorClient(settings.hub, settings.token) if settings.hub is not None else None
        )

    def run(self) -> None:
        """Look until the ranks have ended."""
        last = time.monotonic()
        most = SUSPENDED_S + (self._spoke is not None) * SILENT_S  # the other may not answer
        self._look(0.0)  # ranks may be gone already
        while self._is_needed():
            time.sleep(LOOK_S)
            now = time.monotonic()
            # a monitor that was suspended itself has not seen the ranks stand still
            self._look(min(now - last, most))
            last = now
            verdict = self._verdict()
            if verdict is not None:
                self._end(verdict)
                break
        else:
            if self._spoke is not None and self._spoke.is_heard:
                self._spoke.exchange(self._own(), at_once=True)  # some may be gone

    def _is_needed(self) -> bool:
        """Whether there are ranks, here or where others look who ask this monitor, or there may be
        some soon."""
        if self._hub is not None and self._hub.is_asked:
            return True
        if not self._ranks:
            return os.getppid() == self._settings.starter
        if not all(rank.ended for rank in self._ranks.values()):
            return True
        if self._hub is None or self._hub.was_asked or self._alone_s >= UNASKED_S:
            return False
        return any(rank.gone for rank in self._ranks.values())

    def _look(self, seconds: float) -> None:
        for name in os.listdir(self._folder):
            number = name.removeprefix(PREFIX)
            if name.startswith(PREFIX) and number.isdigit() and int(number) not in self._ranks:
                self._ranks[int(number)] = _Rank(self._folder / name)
        for looked_after in (*self._ranks.values(), self._hub, self._spoke):
            if looked_after is not None:
                looked_after.look(seconds)
        if self._ranks and all(rank.ended for rank in self._ranks.values()):
            self._alone_s += seconds

    def _verdict(self) -> str | None:
        """One line on a hang; None as long as there is none."""
        limit = self._settings.limit_s
        own = self._own()
        if self._spoke is not None and self._spoke.is_heard:
            return self._spoke.exchange(own)
        other = self._hub or self._spoke
        views = {**own, **(other.views() if other is not None else {})}
        culprit = diagnose(views, limit)
        verdict = describe(culprit, views, limit) if culprit is not None else None
        if self._hub is not None:
            self._hub.tell(verdict, own)
        return verdict

    def _own(self) -> dict[int, RankView]:
        """The ranks of this node that have not left."""
        return {number: rank.view() for number, rank in self._ranks.items() if not rank.state.left}

    def _end(self, verdict: str) -> None:
        """Have the ranks end, by a line that says why."""
        report = self._report()
        if report is not None:
            verdict += f"; stacks of all threads are in {report}"
        told_of = json.dumps([verdict, None if report is None else str(report)])
        (self._folder / f".{VERDICT}").write_text(told_of)
        (self._folder / f".{VERDICT}").rename(self._folder / VERDICT)
        for rank in self._ranks.values():
            rank.reader.tell()
        began = time.monotonic()
        if self._hub is not None:
            self._hub.await_all()
        if self._hub is not None or self._spoke is not None:
            time.sleep(SAY_S)
        while time.monotonic() < began + END_S and not all(
            rank.ended or rank.view().frozen for rank in self._ranks.values()
        ):
            time.sleep(LOOK_S / 5)
        for rank in self._ranks.values():
            rank.send(signal.SIGKILL)

    def _report(self) -> Path | None:
        """Write down what all ranks of the node do; returns the folder, None if none can be made.

        A rank that is stopped writes its stacks if it ever goes on. `noticed` is when the monitor
        has found or heard that the job hangs, in seconds since 1970.
        """
        noticed = time.time()
        for rank in self._ranks.values():
            rank.send(STACKS)
        time.sleep(STACKS_S)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}"
        reports = Path(self._settings.reports)
        try:
            # there may be that of another node that has this one's name
            report = make_folder(reports.parent, f"{reports.name}/{name}")
            for number, rank in sorted(self._ranks.items()):
                stacks = self._folder / f"{PREFIX}{number}.stacks"
                if stacks.exists():
                    text = stacks.read_text(encoding="utf-8", errors="replace")
                    write_no_symlinks(report, f"{PREFIX}{number}.txt", text)
                view = rank.view()._asdict() | {"state": rank.state._asdict(), "noticed": noticed}
                write_no_symlinks(
                    report, f"{PREFIX}{number}.json", json.dumps(view, indent=1) + "\n"
                )
        except OSError:
            return None
        return report


def main() -> None:
    """Run a monitor by the settings that come as JSON; none come from a rank that ends first."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    text = sys.stdin.read()
    if not text:
        return
    settings = Settings(**json.loads(text))
    try:
        Monitor(settings).run()
    finally:
        shutil.rmtree(settings.folder, ignore_errors=True)
