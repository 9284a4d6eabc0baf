"""Ranks that take longer for their work than others do: stragglers.

A rank's *peers* are the ranks that hold the same stages: its tensor- and data-parallel ones, and
its mirror image in a bidirectional pipeline, or the others of a replicated stage. Its score is its
own time (:mod:`.own_time`) by the median of theirs, both by the operations that the schedule gives
them.

A rank without peers is compared with all others, by the FLOPs of their stages. Stages of as many
FLOPs may well differ in time. So a score of up to :data:`UNEVEN` in the first windows is no sign
of a slow rank, and later scores are divided by it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from statistics import fmean, median
from typing import Literal, NamedTuple

SLOW = 1.3
"""The least score of a straggler..."""
SLOW_ALONE = 1.5
"""... of one without peers, which besides takes longer..."""
LEAST_S = 0.05
"""... by so many seconds of a step: in small models threads and the system's turns weigh more than
FLOPs..."""
FINE = 1.15
"""... and of one that is still one..."""
WINDOWS = 2
"""... all in at least so many successive windows..."""
STEPS = 16
"""... of so many steps together."""
CHANGE = 1.5
"""The factor between two scores of a straggler that are both worth a line."""
UNEVEN = 1.5
"""The largest score of a rank without peers that its stages may account for..."""
FIRST = 5
"""... as the median of so many windows tells."""
NOISE = 4.0
"""By how many standard errors the time of a straggler is above that of others at least."""
_ERROR = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of the median of n normal values, by their median absolute deviation / sqrt n."""


class TimingWindow(NamedTuple):
    """The own time of a rank in the steps of a window."""

    seconds: float
    """The median."""
    spread: float
    """The median absolute deviation from it."""
    steps: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> TimingWindow:
        """The window of steps that took this time."""
        middle = median(seconds)
        return cls(middle, median(abs(each - middle) for each in seconds), len(seconds))


class Score(NamedTuple):
    """How long a rank takes, by how long others take."""

    rank: int
    value: float
    own_s: float
    """Its own time in a step..."""
    expected_s: float
    """... and what it would be at the others' pace."""
    slow: bool
    """Whether it is far above that, and not by chance."""
    alone: bool
    """Whether it has no peers."""


class Scorer:
    """Scores several ranks, which hold these `stages` and have so much `work`, in any unit.

    Work counts as half of the mean where it is less: an operation takes time for more than FLOPs.
    """

    def __init__(self, stages: Sequence[Hashable], work: Sequence[float]) -> None:
        least = fmean(work) / 2
        self._work = [max(own, least) or 1.0 for own in work]
        self._groups: dict[Hashable, list[int]] = defaultdict(list)
        for rank, own in enumerate(stages):
            self._groups[own].append(rank)
        self._past: list[list[float]] = [[] for _ in work]
        """Scores of ranks without peers in the first windows."""

    def scores(self, windows: Sequence[TimingWindow]) -> list[Score]:
        """The scores of a window of all ranks, by rank."""
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
        """The score of a rank without peers that its stages account for."""
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
    """The median of an ascending list without one value, which is among several."""
    left, at = len(ordered) - 1, bisect_left(ordered, own)

    def other(index: int) -> float:
        return ordered[index + (index >= at)]

    return (other((left - 1) // 2) + other(left // 2)) / 2


What = Literal["slow", "still", "fine"]
"""A rank has become a straggler, is one by another factor, or is none any more."""


class Change(NamedTuple):
    """News of a straggler."""

    what: What
    """It holds..."""
    since: int
    """... since this step."""
    score: Score
    """That of the last window."""


class _Straggler(NamedTuple):
    told: float
    """The score that was told."""
    since: int


class _Agreeing(NamedTuple):
    """The last windows of a rank, which speak for the same change."""

    on: What
    since: int
    """The first step of the first one."""
    windows: int


class Stragglers:
    """The ranks that are stragglers now, which a window alone does not decide."""

    def __init__(self) -> None:
        self._named: dict[int, _Straggler] = {}
        self._agreeing: dict[int, _Agreeing] = {}

    def changes(self, first: int, steps: int, scores: Sequence[Score]) -> list[Change]:
        """News from a window of so many `steps` that begins at step `first`."""
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
        """The change that a window speaks for."""
        named = self._named.get(score.rank)
        if named is None:
            return "slow" if score.slow else None
        if score.value < FINE:
            return "fine"
        ratio = score.value / named.told
        return "still" if score.slow and not 1 / CHANGE < ratio < CHANGE else None

    def _changed(self, what: What, since: int, score: Score) -> Change:
        if what == "fine":
            del self._named[score.rank]
            return Change(what, since, score)
        if what == "still":
            since = self._named[score.rank].since
        self._named[score.rank] = _Straggler(score.value, since)
        return Change(what, since, score)
