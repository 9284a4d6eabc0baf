"""A process on each node that finds ranks that hang: ``python -m megapipe.watch``.

The monitor reads the journals of the node's ranks four times a second. No rank can delay this.
There is a hang if a rank has waited for its peers for longer than the limit, or for some seconds
for a rank whose process is gone. Then the monitor diagnoses the hang
(:mod:`megapipe.watch.hang_diagnosis`), makes all ranks of the node write their stacks, and passes
them the verdict: the line with which they end. Ranks that cannot end are killed. Before the first
step a lost rank alone counts as a hang, whether or not others wait. With several nodes, one monitor
decides, and the others report to it (:mod:`megapipe.watch.monitor_link`).

The monitor ends when its ranks have ended. If its ranks are gone and no other node has connected
yet, it ends some seconds later. It ignores signals that a terminal or a launcher sends to all
processes.
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

from megapipe.util.no_symlinks import make_folder, write_no_symlinks
from megapipe.util.processes import is_stopped, start_of
from megapipe.watch.hang_diagnosis import RankView, describe, diagnose
from megapipe.watch.journal import PREFIX, JournalReader
from megapipe.watch.monitor_link import SILENT_S, MonitorClient, MonitorServer

LOOK_S = 0.25
"""Seconds between two looks at the journals."""
SUSPENDED_S = 1.0
"""Maximum seconds counted between two looks; a longer gap means a suspended monitor."""
STACKS_S = 0.2
"""Seconds that ranks may take to write the stacks of their threads."""
END_S = 4.0
"""Seconds that ranks may take to end after a verdict. Then the remaining ranks are killed. The
job's exit code is that of the ranks that have ended in time."""
VERDICT_S = 3.0
"""Seconds that ranks of other nodes may take to write a verdict to the store."""
UNASKED_S = 4.0
"""Seconds that the deciding monitor waits for a first other monitor once its ranks are gone."""
VERDICT = "verdict"
"""Name of a file. The file contains the verdict and the path of the report folder."""
STACKS = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
"""Signal at which a rank writes the stacks of its threads."""
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class Settings(NamedTuple):
    """Settings of a monitor, which it reads from stdin as JSON."""

    folder: str
    """Path of the folder with the journals of this node's ranks."""
    limit_s: float
    """Seconds that a rank may wait for other ranks."""
    reports: str
    """Folder in the run folder in which each hang gets a subfolder."""
    starter: int
    """Id of the process that starts the monitor."""
    listens: int = -1
    """Descriptor of the socket to which monitors of other nodes connect; -1: none."""
    hub: tuple[str, int] | None = None
    """Host and port of the deciding monitor; None if this monitor decides or is the only one."""
    token: str = ""
    """Secret that the monitors of a job share."""


class _Rank:
    """A rank of this node, as seen in all looks at its journal so far."""

    def __init__(self, file: Path) -> None:
        self.reader = JournalReader(file)
        self.state = self.reader.read()
        self.began = start_of(self.state.pid)
        self.still_s = 0.0
        self.beatless_s = 0.0
        self._seen: tuple[int, bytes] = (-1, b"")

    def look(self, seconds: float) -> None:
        """Read the journal. `seconds`: time since the previous look."""
        beats, rest = self.reader.look()
        self.beatless_s = self.beatless_s + seconds if beats == self._seen[0] else 0.0
        self.still_s = self.still_s + seconds if rest == self._seen[1] else 0.0
        if rest != self._seen[1]:
            self.state = self.reader.read()
        self._seen = beats, rest

    @property
    def ended(self) -> bool:
        """Whether the rank is leaving or its process is gone."""
        return self.state.left or self.gone

    @property
    def gone(self) -> bool:
        """Whether the process ended without leaving, even if a new process has its id now."""
        began = start_of(self.state.pid)
        return not self.state.left and (began is None or began != self.began)

    def view(self) -> RankView:
        """Return the contents of the journal with the observed state of the process."""
        gone = self.gone
        stopped = not gone and is_stopped(self.state.pid)
        host = socket.gethostname()
        return RankView(self.state, self.still_s, self.beatless_s, stopped, host, gone)

    def send(self, number: int) -> None:
        """Send the rank's process a signal."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.state.pid, number)


class Monitor:
    """Watches the ranks that have a journal in the folder ``settings.folder``."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._ranks: dict[int, _Rank] = {}
        self._alone_s = 0.0
        """Seconds since all local ranks have ended."""
        self._hub = (
            MonitorServer(settings.listens, settings.token) if settings.listens >= 0 else None
        )
        self._spoke = (
            MonitorClient(settings.hub, settings.token) if settings.hub is not None else None
        )

    def run(self) -> None:
        """Watch the ranks until they have ended, or until a hang is found and handled."""
        last = time.monotonic()
        most = SUSPENDED_S + (self._spoke is not None) * SILENT_S  # the other may not answer
        self._look(0.0)  # some ranks may be gone already
        while self._is_needed():
            time.sleep(LOOK_S)
            now = time.monotonic()
            # count little time if this monitor was suspended: it has not observed the ranks then
            self._look(min(now - last, most))
            last = now
            verdict = self._verdict()
            if verdict is not None:
                self._end(verdict)
                break
        else:
            if self._spoke is not None and self._spoke.is_connected:
                self._spoke.exchange(self._own(), at_once=True)  # tell of ranks that are gone

    def _is_needed(self) -> bool:
        """Whether the monitor has to go on: local ranks run or can still come, or monitors of other
        nodes report to this monitor or can still connect."""
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
        """Return a line that describes a hang; None: no hang was found so far."""
        limit = self._settings.limit_s
        own = self._own()
        if self._spoke is not None and self._spoke.is_connected:
            return self._spoke.exchange(own)
        other = self._hub or self._spoke
        views = {**own, **(other.views() if other is not None else {})}
        culprit = diagnose(views, limit)
        verdict = describe(culprit, views, limit) if culprit is not None else None
        if self._hub is not None:
            self._hub.set_answer(verdict, own)
        return verdict

    def _own(self) -> dict[int, RankView]:
        """Return the views of this node's ranks, without those that have left."""
        return {number: rank.view() for number, rank in self._ranks.items() if not rank.state.left}

    def _end(self, verdict: str) -> None:
        """Make all ranks of the node end with the line `verdict`."""
        report = self._report()
        if report is not None:
            verdict += f"; stacks of all threads are in {report}"
        contents = json.dumps([verdict, None if report is None else str(report)])
        (self._folder / f".{VERDICT}").write_text(contents)
        (self._folder / f".{VERDICT}").rename(self._folder / VERDICT)
        for rank in self._ranks.values():
            rank.reader.announce_verdict()
        began = time.monotonic()
        if self._hub is not None:
            self._hub.await_all()
        if self._hub is not None or self._spoke is not None:
            time.sleep(VERDICT_S)
        while time.monotonic() < began + END_S and not all(
            rank.ended or rank.view().frozen for rank in self._ranks.values()
        ):
            time.sleep(LOOK_S / 5)
        for rank in self._ranks.values():
            rank.send(signal.SIGKILL)

    def _report(self) -> Path | None:
        """Write the journals and stacks of all ranks of the node into a new folder. Return the
        folder; None if it cannot be made.

        A suspended rank writes its stacks only if it ever continues. The field `noticed` is the
        time at which the monitor found or heard of the hang, in seconds since 1970.
        """
        noticed = time.time()
        for rank in self._ranks.values():
            rank.send(STACKS)
        time.sleep(STACKS_S)
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}"
        reports = Path(self._settings.reports)
        try:
            # another node with the same host name may have made the folder
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
    """Run a monitor with the JSON settings on stdin; do nothing if the starting rank sent none."""
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
