"""Ends the ranks of a launcher on this node when some of them have ended.

torchrun's agent watches the ranks in one thread. It gives each remaining rank half a minute to end,
which a suspended rank never does. In between, the agent asks the store, and waits forever if the
host of the store is suspended or cannot be reached. So this module ends ranks in a thread of its
own when the agent cannot.
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
"""Seconds that the agent may take to notice a rank's failure after all ranks have ended."""


class RankReaper(threading.Thread):
    """Kills suspended ranks if another rank has ended or the job has failed elsewhere. After all
    ranks have ended, the agent has LATE_S to notice a rank's failure; then this thread calls
    `late` with the exit code."""

    def __init__(
        self,
        pids: Callable[[], list[int]],
        has_failed: Callable[[], bool],
        has_noticed: Callable[[], bool],
        late: Callable[[int], object],
    ) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        """Event that is set when the agent no longer needs the ranks."""
        self._pids = pids
        self._has_failed = has_failed
        self._has_noticed = has_noticed
        self._late = late
        self.killed = set[int]()
        """Process ids of the ranks that this thread has killed."""

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
    """Whether a child of this process has ended, even if nobody has read its exit code yet."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def exit_code(pid: int) -> int | None:
    """Return the exit code of a child, 128 + n for signal n; None if the child runs or its exit
    code was read already."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status + 128 * (found.si_code != os.CLD_EXITED)
