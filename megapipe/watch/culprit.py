"""Which rank a hanging job waits for, by the journals of all ranks.

A rank that waits for an exchange waits for those of its members that have not begun it. Following
them leads to a rank that waits for nobody: its process is gone or stopped, it holds Python's lock,
or it is busy with something that does not end. Or it leads to an exchange that all members have
begun and one of them still waits for: then a message is lost.

Before the first step a rank may work for hours, as one that tokenizes a corpus, and the others wait
for it. There nobody is to blame for that, and nobody has to wait for a rank that will never come:
one that is gone, stopped or out of reach.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from megapipe.watch.journal import JournalState
from megapipe.words import ranges

BEATLESS_S = 3.0
"""Seconds without a beat of a rank's heart, which beats four times a second, after which something
holds Python's lock there."""
GONE_S = 5.0
"""Seconds for which one waits in vain for a rank whose process is gone. As a rule a connection
tells at once; and where the rank has failed by itself, it has told the store."""


Why = Literal[
    "gone", "stopped", "unheard", "holds the lock", "busy", "sent nothing", "unclear", "unknown"
]
ORDER: tuple[Why, ...] = get_args(Why)
"""Kinds of evidence, the surest first."""


class RankView(NamedTuple):
    """The journal of a rank as a monitor sees it."""

    state: JournalState
    still_s: float
    """Seconds for which it has not changed, but for the heart..."""
    beatless_s: float
    """... and for which that has not beaten."""
    stopped: bool
    """A signal has stopped the process."""
    host: str
    gone: bool = False
    """The process has ended, and has not said that it leaves."""
    unheard: bool = False
    """This is what the monitor of its node has told last, and that is not heard any more."""

    @property
    def frozen(self) -> bool:
        """Whether it hears nothing: it is gone, stopped or out of reach, or its heart does not
        beat."""
        return self.lost is not None or self.beatless_s >= BEATLESS_S

    @property
    def lost(self) -> Why | None:
        """Why nothing more is to be expected of it, if so."""
        if self.gone:
            return "gone"
        if self.stopped:
            return "stopped"
        return "unheard" if self.unheard else None

    @property
    def waits(self) -> bool:
        """Whether it waits for others."""
        return self.state.line is not None and not self.frozen


class HangDiagnosis(NamedTuple):
    """The rank that others wait for, and how one can tell."""

    rank: int
    why: Why
    seconds: float
    """For how long."""
    waiting: tuple[int, ...]
    """The ranks that are known to wait, for it or for others that do: not all that ranks wait for
    before the first step is in their journals."""


def diagnose(views: Mapping[int, RankView], limit_s: float) -> HangDiagnosis | None:
    """The culprit, where a rank has waited for `limit_s` seconds, or for GONE_S for one that is
    gone, and is still there to tell; or a rank that is lost for so long before its first step, or
    that is gone where one has lost contact; else None. Of several the one with the surest evidence,
    and of these the one that stands still the longest."""
    waiting = sorted(rank for rank, view in views.items() if view.waits)
    found = _lost(views, limit_s) or _waited_for(views, limit_s)
    if found is None:
        return None
    why, rank, seconds = found
    return HangDiagnosis(rank, why, seconds, tuple(r for r in waiting if r != rank))


def _lost(views: Mapping[int, RankView], limit_s: float) -> tuple[Why, int, float] | None:
    """The evidence against a rank of which nothing more is to be expected, and for how long, where
    nobody has to be seen to wait for it. Its journal may stand still for as long as it works: its
    heart tells since when it is lost."""
    contact = any(view.state.lost_contact for view in views.values())

    def enough(view: RankView) -> bool:
        if view.gone and contact:
            return True
        patience_s = GONE_S if view.gone else limit_s
        return view.state.step == 0 and view.beatless_s >= patience_s

    lost = [
        (view.lost, rank, view.beatless_s)
        for rank, view in views.items()
        if view.lost is not None and enough(view)
    ]
    if not lost or all(view.frozen for view in views.values()):
        return None
    return min(lost, key=lambda found: (ORDER.index(found[0]), -found[2], found[1]))


def _waited_for(views: Mapping[int, RankView], limit_s: float) -> tuple[Why, int, float] | None:
    """The same for a rank that others have waited for, whatever it does."""
    gone = [found for found in _followed(views, _late(views, GONE_S)) if found[0] == "gone"]
    evidence = gone or list(_followed(views, _late(views, limit_s)))
    if not evidence:
        return None
    why, rank = min(
        evidence,
        key=lambda found: (ORDER.index(found[0]), -_seconds(views, found[1]), found[1]),
    )
    return why, rank, _seconds(views, rank)


def _late(views: Mapping[int, RankView], seconds: float) -> list[int]:
    """The ranks that have waited for so long."""
    return [rank for rank, view in views.items() if view.waits and view.still_s >= seconds]


def _seconds(views: Mapping[int, RankView], rank: int) -> float:
    return views[rank].still_s if rank in views else 0.0


def _followed(views: Mapping[int, RankView], late: Iterable[int]) -> Iterator[tuple[Why, int]]:
    """The evidence against each rank to which those that are late lead, and its number."""
    seen: set[int] = set()
    next_ones = list(late)
    while next_ones:
        rank = next_ones.pop()
        if rank in seen:
            continue
        seen.add(rank)
        view = views.get(rank)
        if view is None:
            yield "unknown", rank
        elif view.lost is not None:
            yield view.lost, rank
        elif view.beatless_s >= BEATLESS_S:
            yield "holds the lock", rank
        elif not view.waits:
            yield "busy", rank
        else:
            others = [member for member in view.state.waits_for if member != rank]
            behind = [member for member in others if _begun(views, member, view) is not True]
            next_ones += behind or others  # what has begun may be stopped before it has sent
            if not behind and len(others) == 1:
                yield "sent nothing", others[0]
            elif not behind:
                yield "unclear", rank


def _begun(views: Mapping[int, RankView], member: int, view: RankView) -> bool | None:
    """Whether a member has begun the exchange that `view` waits for; None where nobody knows."""
    other = views.get(member)
    if other is None or view.state.line is None:
        return None
    return other.state.begun.get(view.state.line, 0) >= view.state.exchange


def describe(culprit: HangDiagnosis, views: Mapping[int, RankView], limit_s: float) -> str:
    """One line on a culprit, for the user."""
    view = views.get(culprit.rank)
    waiting = culprit.waiting
    ranks = f"rank{'s' * (len(waiting) > 1)} {ranges(waiting)}" if waiting else "the job"
    who = f"{ranks} wait{'s' * (len(waiting) <= 1)}"
    if view is None:
        return (
            f"the job hangs: {who} for rank {culprit.rank}, of which nothing is known, for "
            f"{limit_s:g} s (parallel.timeout_s)"
        )
    state = view.state
    who_it_is = [part for part in (state.place, f"process {state.pid} on {view.host}") if part]
    step = f"step {state.step}" if state.step else ""
    does = ": ".join(part for part in (step, state.does) if part)
    whose = f"rank {culprit.rank} ({'; '.join(who_it_is)})"
    at = f" at {does}" if does else ""
    if culprit.why == "gone":
        return f"{ranks} lost contact with {whose}, whose process has ended without a word{at}"
    what = {
        "stopped": "is stopped by a signal",
        "unheard": "is on a node of which nothing is heard any more",
        "holds the lock": "does not answer, as something holds Python's lock",
        "busy": "comes no further",
        "sent nothing": "waits as well, and what it has sent does not arrive",
        "unclear": "waits for an exchange that all its members have begun",
    }[culprit.why]
    return (
        f"the job hangs: {whose} {what}, for {culprit.seconds:.0f} s{at}; {who} for it "
        f"(parallel.timeout_s={limit_s:g})"
    )
