"""The ranks that a launcher has started on this node, when some of them have ended.

torchrun's agent looks after them, in one thread: it gives each of those that are left half a minute
to end, which one that is stopped never does, and it asks the store of all nodes in between, for
ever if the host of that is stopped or out of reach. This thread does what the agent then does not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable

from megapipe.util.processes import is_stopped

LOOK_S = 0.25
LATE_S = 1.0
"""How long after the last rank has failed and ended its agent may take to notice."""


class RankReaper(threading.Thread):
    """Kills ranks that are stopped where another has ended or the job `has_failed`, and calls
    `late` with the exit code where all have ended, one failed, and the agent, which asks for it
    first, has not noticed."""

    def __init__(
        self,
        pids: Callable[[], list[int]],
        has_failed: Callable[[], bool],
        has_noticed: Callable[[], bool],
        late: Callable[[int], object],
    ) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        """Set when the agent is done with the ranks."""
        self._pids = pids
        self._has_failed = has_failed
        self._has_noticed = has_noticed
        self._late = late
        self.killed = set[int]()
        """The ranks that it has killed."""

    def run(self) -> None:
        code: int | None = None
        since: float | None = None
        while since is None or time.monotonic() < since + LATE_S:
            if self.over.wait(LOOK_S):
                return
            pids = self._pids()
            running = [pid for pid in pids if not _has_ended(pid)]
            if code is None:
                code = next((c for pid in pids if (c := exit_code(pid)) not in (None, 0)), None)
            if len(running) < len(pids) or self._has_failed():
                for pid in running:
                    if is_stopped(pid):
                        self.killed.add(pid)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
            if since is None and pids and not running and code is not None:
                since = time.monotonic()
        assert code is not None
        if not self._has_noticed():
            self._late(code)


def _has_ended(pid: int) -> bool:
    """Whether a child of this process has ended, whether or not somebody asked for its code."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def exit_code(pid: int) -> int | None:
    """The exit code of a child that nobody has asked for it yet, 128 + n for signal n; else
    None."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status + 128 * (found.si_code != os.CLD_EXITED)
