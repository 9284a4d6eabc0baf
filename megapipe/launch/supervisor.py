"""Whether a job that has failed is started again, and how."""

from __future__ import annotations

import signal
from typing import NamedTuple

from megapipe.errors import Preempted, TooManyRestarts
from megapipe.launch.progress import Progress
from megapipe.words import count_noun

FAULTS = (1, 4, 9)
"""Exit codes of faults that may go away by themselves: an unexpected exception, as of a device, a
peer that is lost, and copies of a value that differ. Mistakes of the user's do not; a signal that
kills a rank has 128 + its number."""
LONGEST_S = 60.0
"""The longest wait before a start."""


class RestartDecision(NamedTuple):
    """The next start of a job."""

    number: int
    """How many starts in a row have come no further, this one included; 0: the last one was
    stopped so that other nodes take part."""
    wait_s: float
    before: int
    """Of the checkpoint to begin with: the steps that it has fewer than; 0: the newest."""


class Supervisor:
    """Decides about one job, which may be started again `limit` times without coming further.

    One that is `elastic` goes on with the nodes that there are where a node was asked to stop."""

    def __init__(self, limit: int, *, elastic: bool = False) -> None:
        self._limit = limit
        self._elastic = elastic
        self._best = -1
        """The most steps that a start has done."""
        self._last: Progress | None = None
        self._number = 0
        self._before = 0

    def decide(self, code: int, progress: Progress) -> RestartDecision | None:
        """The start after one that has ended with an exit code and done so many steps; None if
        there is to be none. Raises :class:`TooManyRestarts`.

        A program that was no run, or ended before it had looked for a checkpoint, is not started
        again: nothing is known of whether it can go on. Nor is one that had none and ended in an
        exception before it ever trained: the next start would do the same. Where two starts in a
        row fail at one step, or before they train, and the checkpoint of the second is one that the
        first had or made, the next begins with an older one: that may be poisoned.
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
            far = f"came no further than step {self._best}" if trained else "did no step"
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


def line(again: RestartDecision, limit: int, step: int) -> str:
    """A line for the user on a start."""
    place = f"step {step}" if step >= 0 else "a start without a step"
    if again.number == 0:
        return f"starting again after {place}, with the nodes that there are"
    older = f", from before step {again.before}" if again.before > 0 else ""
    wait = f"in {again.wait_s:g} s" if again.wait_s else "now"
    return f"starting again after {place} ({again.number} of {limit}), {wait}{older}"
