"""Finds the rank that a hanging job waits for, from the journals of all ranks.

A rank that waits in an exchange waits for the members that have not begun the exchange. A chain of
such waits may end at a rank that waits for nobody. The process of that rank is gone or stopped, or
its GIL is never released, or it is busy without end. Or the chain ends at an exchange that all
members have begun and one member still waits for: then a message is lost.

Before the first step a rank may work for hours, for example to tokenize a corpus, while others wait
for it. This is not a hang. But a rank that is gone, stopped or out of reach will never come, and is
reported even then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from megapipe.text import ranges
from megapipe.watch.journal import JournalState

BEATLESS_S = 3.0
"""Seconds without a heartbeat after which a rank's GIL counts as never released. Ranks send four
heartbeats per second."""
GONE_S = 5.0
"""Seconds after which a wait for a rank whose process is gone is a hang. Ranks usually notice
sooner, by a broken connection or, if the rank fails by itself, by its entry in the store."""


Why = Literal[
    "gone", "stopped", "unheard", "holds the lock", "busy", "sent nothing", "unclear", "unknown"
]
ORDER: tuple[Why, ...] = get_args(Why)
"""Kinds of evidence, the most certain first."""


class RankView(NamedTuple):
    """The journal of a rank, and the state of its process, as a monitor sees them."""

    state: JournalState
    still_s: float
    """Seconds for which the journal, apart from the heartbeat, has not changed."""
    beatless_s: float
    """Seconds since the last heartbeat."""
    stopped: bool
    """Whether a signal has suspended the process."""
    host: str
    gone: bool = False
    """Whether the process has ended without recording in the journal that it leaves."""
    unheard: bool = False
    """Whether the view is old: the rank's monitor, on another node, has sent nothing since."""

    @property
    def frozen(self) -> bool:
        """Whether the rank cannot react: it is gone, stopped, out of reach, or has no heartbeat."""
        return self.lost is not None or self.beatless_s >= BEATLESS_S

    @property
    def lost(self) -> Why | None:
        """Reason why the rank will not continue; None if it can continue."""
        if self.gone:
            return "gone"
        if self.stopped:
            return "stopped"
        return "unheard" if self.unheard else None

    @property
    def waits(self) -> bool:
        """Whether the rank waits for others."""
        return self.state.line is not None and not self.frozen


class HangDiagnosis(NamedTuple):
    """The rank that other ranks wait for in a hang, and the evidence."""

    rank: int
    why: Why
    seconds: float
    """Seconds for which the rank's journal has not changed, or for which the rank has been lost."""
    waiting: tuple[int, ...]
    """Ranks that are known to wait. Before the first step the list can be incomplete, because
    journals do not record all waits of that time."""


def diagnose(views: Mapping[int, RankView], limit_s: float) -> HangDiagnosis | None:
    """Return the diagnosis of a hang; None if there is no evidence of a hang.

    There are three kinds of hang. A rank has waited for `limit_s` seconds, or for GONE_S seconds
    for a rank that is gone. A rank has been lost for `limit_s` seconds, or gone for GONE_S seconds,
    before its first step. Or a rank is gone and any rank has lost contact. Of several suspects, the
    one with the most certain evidence is returned; if that is equal, the one silent for longest.
    """
    waiting = sorted(rank for rank, view in views.items() if view.waits)
    found = _lost(views, limit_s) or _waited_for(views, limit_s)
    if found is None:
        return None
    why, rank, seconds = found
    return HangDiagnosis(rank, why, seconds, tuple(r for r in waiting if r != rank))


def _lost(views: Mapping[int, RankView], limit_s: float) -> tuple[Why, int, float] | None:
    """Find a rank that will not continue, even if no other rank is seen to wait for it. Return the
    reason, the rank, and the seconds since its last heartbeat. The heartbeat counts because a
    journal can stay unchanged while its rank works."""
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
    """Find the rank for which others have waited too long: reason, rank, and seconds."""
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
    """Return the ranks that have waited for `seconds` or longer."""
    return [rank for rank, view in views.items() if view.waits and view.still_s >= seconds]


def _seconds(views: Mapping[int, RankView], rank: int) -> float:
    return views[rank].still_s if rank in views else 0.0


def _followed(views: Mapping[int, RankView], late: Iterable[int]) -> Iterator[tuple[Why, int]]:
    """Follow the waits of the ranks `late`. Yield (reason, rank) where a chain of waits ends."""
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
            next_ones += behind or others  # a stopped member may have begun, but not sent
            if not behind and len(others) == 1:
                yield "sent nothing", others[0]
            elif not behind:
                yield "unclear", rank


def _begun(views: Mapping[int, RankView], member: int, view: RankView) -> bool | None:
    """Whether `member` has begun the exchange that `view` waits for; None: unknown."""
    other = views.get(member)
    if other is None or view.state.line is None:
        return None
    return other.state.begun.get(view.state.line, 0) >= view.state.exchange


def describe(culprit: HangDiagnosis, views: Mapping[int, RankView], limit_s: float) -> str:
    """Return a diagnosis as one line for the user."""
    view = views.get(culprit.rank)
    waiting = culprit.waiting
    ranks = f"rank{'s' * (len(waiting) > 1)} {ranges(waiting)}" if waiting else "the job"
    who = f"{ranks} wait{'s' * (len(waiting) <= 1)}"
    if view is None:
        return (
            f"the job hangs: {who} for rank {culprit.rank}, whose state is unknown, for "
            f"{limit_s:g} s (parallel.timeout_s)"
        )
    state = view.state
    who_it_is = [
        part for part in (state.coordinates, f"process {state.pid} on {view.host}") if part
    ]
    step = f"step {state.step}" if state.step else ""
    does = ": ".join(part for part in (step, state.does) if part)
    whose = f"rank {culprit.rank} ({'; '.join(who_it_is)})"
    at = f" at {does}" if does else ""
    if culprit.why == "gone":
        return (
            f"{ranks} lost contact with {whose}, whose process ended without an error message{at}"
        )
    what = {
        "stopped": "is stopped by a signal",
        "unheard": "is on a node that sends nothing any more",
        "holds the lock": "does not answer, because something holds Python's lock",
        "busy": "makes no progress",
        "sent nothing": "waits too, and its messages do not arrive",
        "unclear": "waits for a collective that all its ranks have started",
    }[culprit.why]
    return (
        f"the job hangs: {whose} {what}, for {culprit.seconds:.0f} s{at}; {who} for it "
        f"(parallel.timeout_s={limit_s:g})"
    )
