"""Stragglers: ranks that take longer for their own work than others do.

A rank's *peers* are the ranks that hold the same stages: tensor- and data-parallel ranks, the
mirror image in a bidirectional pipeline, and other holders of a replicated stage. A rank's score is
its compute time (:mod:`.compute_time`) divided by the median compute time of its peers. Times are
first divided by the work of the operations that the schedule assigns to a rank.

A rank without peers is compared with all other ranks. Stages of equal FLOPs can differ in time. So
the rank's median score in the first timing windows, up to :data:`UNEVEN`, is attributed to its
stage, and scores are divided by it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

SLOW = 1.3
"""Smallest score of a straggler that has peers."""
SLOW_ALONE = 1.5
"""Smallest score of a straggler that has no peers."""
LEAST_S = 0.05
"""Smallest excess time of a straggler without peers, in seconds per step. In small models, threads
and scheduling matter more than FLOPs."""
FINE = 1.15
"""Score below which a rank is no longer a straggler."""
WINDOWS = 2
"""Smallest number of successive timing windows that must indicate the same change."""
STEPS = 16
"""Smallest number of steps that these timing windows must cover together."""
CHANGE = 1.5
"""Factor by which a straggler's score must change to be reported again."""
UNEVEN = 1.5
"""Largest score of a rank without peers that the differences of stages may explain."""
FIRST = 5
"""Number of first timing windows whose median score is attributed to differences of stages."""
NOISE = 4.0
"""Number of standard errors by which a straggler's time must exceed the expected time."""
_ERROR = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of a median of n normal values, per (median absolute deviation / sqrt n)."""


class TimingWindow(NamedTuple):
    """Compute time of a rank in the steps of one timing window."""

    seconds: float
    """Median compute time of a step, seconds."""
    spread: float
    """Median absolute deviation of the compute time, seconds."""
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> TimingWindow:
        """Build the window from the compute time of each step."""
        middle = median(seconds)
        return cls(middle, median(abs(each - middle) for each in seconds), len(seconds))


class Score(NamedTuple):
    """A rank's compute time relative to that of other ranks."""

    rank: int
    value: float
    own_s: float
    """Compute time in a step, seconds."""
    expected_s: float
    """Seconds that the step would take at the pace of the other ranks."""
    slow: bool
    """Whether the rank is much slower than the others, by more than chance explains."""
    alone: bool
    """Whether the rank has no peers."""


class Scorer:
    """Scores ranks in timing windows. `stages`: by rank, the stages that the rank holds; ranks with
    equal stages are peers. `work`: by rank, the work per step.

    Work may have any unit, such as FLOPs. It counts as at least half of the mean, because
    operations also take time that does not depend on FLOPs.
    """

    def __init__(self, stages: Sequence[Hashable], work: Sequence[float]) -> None:
        least = fmean(work) / 2
        self._work = [max(own, least) or 1.0 for own in work]
        self._groups: dict[Hashable, list[int]] = defaultdict(list)
        for rank, own in enumerate(stages):
            self._groups[own].append(rank)
        self._past: list[list[float]] = [[] for _ in work]
        """Scores in the first timing windows, by rank; only for ranks without peers."""

    def scores(self, windows: Sequence[TimingWindow]) -> list[Score]:
        """Return the score of each rank. `windows`: by rank, the times in one timing window."""
        paces = [window.seconds / work for window, work in zip(windows, self._work, strict=True)]
        spreads = [window.spread / work for window, work in zip(windows, self._work, strict=True)]
        found: list[Score] = []
        as_usual = True
        for group in self._groups.values():
            alone = len(group) == 1
            compared = range(len(windows)) if alone else group
            ordered = sorted(paces[rank] for rank in compared)
            spread = median(spreads[rank] for rank in compared)
            errors = _ERROR * math.sqrt(1 + 1 / (len(ordered) - 1))
            for rank in group:
                usual = self._usual(rank, paces[rank], ordered) if alone else 1.0
                expected = usual * _median_of_others(ordered, paces[rank]) * self._work[rank]
                own = windows[rank]
                deviation = max(own.spread, spread * self._work[rank])
                error = errors * deviation / math.sqrt(own.steps)
                value = own.seconds / expected if expected else 1.0
                large = value >= (SLOW_ALONE if alone else SLOW)
                as_usual &= not large
                excess = own.seconds - expected
                slow = large and excess > max(NOISE * error, LEAST_S * alone)
                found.append(Score(rank, value, own.seconds, expected, slow, alone))
        if as_usual:
            self._remember(paces)
        return sorted(found)

    def _usual(self, rank: int, pace: float, ordered: Sequence[float]) -> float:
        """Return the score that a rank without peers is expected to have, as stages differ."""
        others = _median_of_others(ordered, pace)
        past = self._past[rank] or [pace / others if others else 1.0]
        return max(1.0, min(median(past), UNEVEN))

    def _remember(self, paces: Sequence[float]) -> None:
        ordered = sorted(paces)
        for rank, *peers in self._groups.values():
            others = _median_of_others(ordered, paces[rank])
            if not peers and others and len(self._past[rank]) < FIRST:
                self._past[rank].append(paces[rank] / others)


def _median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of the values of an ascending list, without one value that equals `own`."""
    left, at = len(ordered) - 1, bisect_left(ordered, own)

    def other(index: int) -> float:
        return ordered[index + (index >= at)]

    return (other((left - 1) // 2) + other(left // 2)) / 2


What = Literal["slow", "still", "fine"]
"""News of a rank: slow (new straggler), still (straggler with another score), fine (recovered)."""


class Change(NamedTuple):
    """A change of a rank's state as a straggler, to be reported."""

    what: What
    """Kind of the change."""
    since: int
    """First step of the present state: since when the rank is slow, or fine again."""
    score: Score
    """Score of the rank in the newest timing window."""


class _Straggler(NamedTuple):
    reported: float
    """Score that was reported last."""
    since: int


class _Agreeing(NamedTuple):
    """The newest consecutive timing windows of a rank that indicate the same change."""

    on: What
    since: int
    """First step of the first of these timing windows."""
    windows: int


class Stragglers:
    """The ranks that are stragglers now. A single timing window does not change the list."""

    def __init__(self) -> None:
        self._named: dict[int, _Straggler] = {}
        self._agreeing: dict[int, _Agreeing] = {}

    def changes(self, first: int, steps: int, scores: Sequence[Score]) -> list[Change]:
        """Return the changes after a timing window of `steps` steps that begins at step `first`."""
        needed = max(WINDOWS, math.ceil(STEPS / steps))
        found = []
        for score in scores:
            what = self._wanted(score)
            last = self._agreeing.pop(score.rank, None)
            if what is None:
                continue
            agreeing = last if last and last.on == what else _Agreeing(what, first, 0)
            agreeing = agreeing._replace(windows=agreeing.windows + 1)
            if agreeing.windows < needed:
                self._agreeing[score.rank] = agreeing
            else:
                found.append(self._changed(what, agreeing.since, score))
        return found

    def _wanted(self, score: Score) -> What | None:
        """Return the change that the score of a window indicates; None: no change."""
        named = self._named.get(score.rank)
        if named is None:
            return "slow" if score.slow else None
        if score.value < FINE:
            return "fine"
        ratio = score.value / named.reported
        return "still" if score.slow and not 1 / CHANGE < ratio < CHANGE else None

    def _changed(self, what: What, since: int, score: Score) -> Change:
        if what == "fine":
            del self._named[score.rank]
            return Change(what, since, score)
        if what == "still":
            since = self._named[score.rank].since
        self._named[score.rank] = _Straggler(score.value, since)
        return Change(what, since, score)
