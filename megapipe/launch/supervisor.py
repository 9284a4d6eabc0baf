"""Decides whether a failed job is restarted, and how."""

from __future__ import annotations

import signal
from typing import NamedTuple

from megapipe.errors import Preempted, TooManyRestarts
from megapipe.launch.progress import Progress
from megapipe.text import count_noun

FAULTS = (1, 4, 9)
"""Exit codes of faults that may be transient: an unexpected exception (from a device, for example),
a lost peer, and replicas that differ. Mistakes of the user have other codes. If a signal kills a
rank, the code is 128 + the signal's number, which counts as a fault too unless the user sent it."""
LONGEST_S = 60.0
"""Maximum wait before a restart, in seconds."""


class RestartDecision(NamedTuple):
    """How a job is restarted."""

    number: int
    """Number of starts in a row without progress, including the next one. 0: the last start was
    stopped so that the set of nodes can change."""
    wait_s: float
    before: int
    """Number of steps below which the next start's checkpoint must be; 0: the newest checkpoint."""


class Supervisor:
    """Decides whether a job is restarted, at most `limit` times in a row without progress. If the
    job is `elastic` and a node was asked to stop, the job continues with the remaining nodes."""

    def __init__(self, limit: int, *, elastic: bool = False) -> None:
        self._limit = limit
        self._elastic = elastic
        self._best = -1
        """Largest number of steps done by any start so far."""
        self._last: Progress | None = None
        self._number = 0
        self._before = 0

    def decide(self, code: int, progress: Progress) -> RestartDecision | None:
        """Decide whether and how the job is restarted after a start that has ended with exit code
        `code`; None means no restart. Raises :class:`TooManyRestarts`.

        A program that is not a run, or that ended before it had looked for a checkpoint, is not
        restarted: it may be unable to continue. A run without a checkpoint that ended in an
        exception before any step is not restarted either: the next start would do the same. A
        checkpoint may be damaged. This is assumed if two starts in a row fail at the same step, or
        before any step, and the second start resumed from a checkpoint that the first had or made.
        Then the next start resumes from an older checkpoint.
        """
        trained = self._best >= 0 or progress.step >= 0
        if self._limit == 0 or (progress.first < 0 and not trained):
            return None
        if code == 1 and progress.first == 0 and not trained:
            return None
        if self._elastic and code == Preempted.exit_code and not progress.ends:
            return RestartDecision(0, 0.0, self._before)
        if not _is_fault(code):
            return None
        if progress.step > self._best:
            self._best, self._number, self._before = progress.step, 0, 0
        elif progress.first >= 0:
            last = self._last
            same = last is not None and last.step == progress.step and last.first <= progress.first
            self._before = progress.first if same else 0
        self._number += 1
        if self._number > self._limit:
            far = f"did not get beyond step {self._best}" if trained else "completed no step"
            raise TooManyRestarts(
                f"{count_noun(self._limit, 'start')} in a row {far}; the last ended with exit code "
                f"{code}"
            )
        if progress.first >= 0:
            self._last = progress
        return RestartDecision(
            self._number, min(2.0 ** (self._number - 1), LONGEST_S), self._before
        )


def _is_fault(code: int) -> bool:
    by_users = (128 + signal.SIGINT, 128 + signal.SIGTERM, 128 + signal.SIGHUP)
    return code in FAULTS or (code > 128 and code not in by_users)


def line(decision: RestartDecision, limit: int, step: int) -> str:
    """Return the line that announces a restart. `step`: steps done."""
    last_step = f"step {step}" if step >= 0 else "a start without a step"
    if decision.number == 0:
        return f"restarting after {last_step} with the remaining nodes"
    older = f", from before step {decision.before}" if decision.before > 0 else ""
    wait = f"in {decision.wait_s:g} s" if decision.wait_s else "now"
    return f"restarting after {last_step} ({decision.number} of {limit}), {wait}{older}"
