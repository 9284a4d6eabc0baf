"""Policies for stale weights: which version each operation reads, by function.

A policy gets the lists with their updates (:class:`Lists`) and one operation of them, and returns
the version that this reads. ``n`` below is the number of updates of a stage that stand before a
place of its rank's list.

=============  ===========================================  ==============================
policy         forward reads; backward reads                system
=============  ===========================================  ==============================
stash          n; as its forward                            PipeDream, 1806.03377
vertical       n of the first stage; as its forward         PipeDream
double_buffer  the window's number less 1; the same         PipeDream-2BW, 2006.09503
double_group   n at the window's first forward; the same    WPipe, ICLR'22
latest         n; n                                         AMPNet, 1705.09786; PACI
predict        n at the window's first forward, predicted;  SpecTrain, 1809.02839; XPipe,
               n, predicted                                 1911.04610; PipeOptim, 2312.00839
correct        n; n, moved back                             PipeMare, 1910.05124
=============  ===========================================  ==============================
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Read


class Lists:
    """The lists of some windows, with the updates that they have, and where each operation is."""

    def __init__(self, lists: Sequence[Sequence[Op]], window: int) -> None:
        self.window = window
        """Micro-batches of a window."""
        self._place: dict[Op, tuple[int, int]] = {}
        """Rank, and place in its list."""
        self._updates: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        """By rank and stage."""
        self._first: dict[tuple[int, int, int], Op] = {}
        """By rank, stage and window."""
        for rank, ops in enumerate(lists):
            for place, op in enumerate(ops):
                if op.kind == Kind.U:
                    self._updates[rank, op.stage].append(place)
                    continue
                self._place[op] = rank, place
                if op.kind == Kind.F:
                    self._first.setdefault((rank, op.stage, self.window_of(op)), op)

    def window_of(self, op: Op) -> int:
        """The window of an operation's micro-batch."""
        return op.microbatch // self.window

    def newest(self, op: Op) -> int:
        """How often the operation's stage has been updated before its place, on its rank."""
        rank, place = self._place[op]
        return bisect_left(self._updates[rank, op.stage], place)

    def forward(self, op: Op, stage: int | None = None) -> Op:
        """The forward of the same micro-batch, at the same stage or another."""
        return Op(Kind.F, op.stage if stage is None else stage, op.microbatch)

    def first(self, op: Op) -> Op:
        """The first forward of the operation's window at its stage, on its rank."""
        return self._first[self._place[op][0], op.stage, self.window_of(op)]

    def staleness(self, stage: int, window: int) -> Fraction:
        """The mean number of updates that the stage's forwards of a window are behind it."""
        numbers = range(window * self.window, (window + 1) * self.window)
        behind = [window - self.newest(Op(Kind.F, stage, number)) for number in numbers]
        return Fraction(sum(behind), len(behind))


Reads = Callable[[Lists, Op], Read]
ALTERNATING = ("1f1b", "eager_1f1b")
"""Orders with one rank and one stage each."""


@dataclass(frozen=True)
class VersionPolicy:
    """Which weights operations read, and when a stage is updated."""

    name: str
    reads: Reads
    orders: tuple[str, ...] = ALTERNATING
    follows: bool = True
    """Backwards read what their forward has read."""
    late: bool = False
    """A stage is updated as late as may be, so that the totals of the window are there: before the
    first forward that reads the new version, and before the last backward of the next window."""
    waits: bool = False
    """An update waits for the totals of its window over all ranks (clipping by the global norm)."""
    agrees: bool = False
    """A micro-batch reads one version at all stages."""


def stash(lists: Lists, op: Op) -> Read:
    """The newest weights, kept for the backward: p - r versions on rank r with windows of one
    micro-batch."""
    return Read(lists.newest(lists.forward(op)))


def vertical(lists: Lists, op: Op) -> Read:
    """On all ranks the version that the first stage has read."""
    return Read(lists.newest(lists.forward(op, stage=0)))


def double_buffer(lists: Lists, op: Op) -> Read:
    """One version behind, on all ranks and for all micro-batches: two versions."""
    return Read(max(0, lists.window_of(op) - 1))


def double_group(lists: Lists, op: Op) -> Read:
    """One version for a window, the newest one at its first forward."""
    return Read(lists.newest(lists.first(op)))


def latest(lists: Lists, op: Op) -> Read:
    """Whatever is newest: no second version is ever kept."""
    return Read(lists.newest(op))


def predict(lists: Lists, op: Op) -> Read:
    """The forward reads what is newest at its window's first forward, predicted to the version that
    its own update will change; the backward reads that (PipeOptim)."""
    if op.kind != Kind.F:
        return Read(lists.newest(op))
    newest = lists.newest(lists.first(op))
    return Read(newest, _behind(lists, op))


def predict_round_trip(lists: Lists, op: Op) -> Read:
    """Both read weights predicted to when the micro-batch is through at the first stage: rank r is
    there floor(r/2) updates later, for windows of one micro-batch (SpecTrain, XPipe). For longer
    windows that share is this project's own: floor(floor(r/2) / m)."""
    later = Fraction(op.stage // 2 // lists.window)
    if op.kind != Kind.F:
        return Read(lists.newest(op), later)
    return Read(lists.newest(lists.first(op)), later + _behind(lists, op))


def correct(lists: Lists, op: Op) -> Read:
    """The backward reads the newest weights, moved back by the mean staleness of forwards."""
    if op.kind == Kind.F:
        return Read(lists.newest(op))
    return Read(lists.newest(op), -lists.staleness(op.stage, lists.window_of(op)))


def _behind(lists: Lists, op: Op) -> Fraction:
    """Updates that come between the window's first forward at a stage and its first backward."""
    return Fraction(lists.window_of(op) - lists.newest(lists.first(op)))


POLICIES = {
    policy.name: policy
    for policy in (
        VersionPolicy("stash", stash, orders=(*ALTERNATING, "1f1b_rr")),
        VersionPolicy("vertical", vertical, agrees=True),
        VersionPolicy(
            "double_buffer",
            double_buffer,
            orders=(*ALTERNATING, "1f1b_rr"),
            late=True,
            waits=True,
            agrees=True,
        ),
        VersionPolicy("double_group", double_group, orders=("two_group",)),
        VersionPolicy("latest", latest, follows=False),
        VersionPolicy("predict", predict, follows=False),
        VersionPolicy("correct", correct, follows=False),
    )
}
HORIZONS: dict[str, Reads] = {"update": predict, "round_trip": predict_round_trip}


def policy(name: str, *, horizon: str = "update") -> VersionPolicy:
    """The policy of a name; `horizon`: of predict, up to when weights are predicted.

    Raises:
        ScheduleError: an unknown name.
    """
    if name not in POLICIES:
        raise ScheduleError(f"weights {name!r} are unknown; the known ones: {', '.join(POLICIES)}")
    found = POLICIES[name]
    return replace(found, reads=HORIZONS[horizon]) if name == "predict" else found
