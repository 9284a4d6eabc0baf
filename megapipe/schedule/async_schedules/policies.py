"""Policies for stale weights: functions that return the weight version that an operation reads.

A policy gets the lists of all ranks (:class:`Lists`) and one operation. In the table, ``n`` is the
newest version: the number of updates of the operation's stage that come before the operation in its
rank's list. Windows are update windows, numbered from 0; the update of window t changes version t.

=============  ===========================================  ==============================
policy         forward reads; backward reads                system
=============  ===========================================  ==============================
stash          n; as its forward                            PipeDream, 1806.03377
vertical       n of the first stage; as its forward         PipeDream
double_buffer  the window's number - 1; as its forward      PipeDream-2BW, 2006.09503
double_group   n at window's first forward; as its forward  WPipe, ICLR'22
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
    """Operations and updates of all ranks in some update windows, with an index of their places in
    the ranks' lists."""

    def __init__(self, lists: Sequence[Sequence[Op]], window: int) -> None:
        self.window = window
        """Number of micro-batches in an update window."""
        self._rank_and_index: dict[Op, tuple[int, int]] = {}
        """Rank of each operation, and its index in the rank's list."""
        self._updates: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        """Indices of updates, by rank and stage."""
        self._first: dict[tuple[int, int, int], Op] = {}
        """First forward, by rank, stage and update window."""
        for rank, ops in enumerate(lists):
            for index, op in enumerate(ops):
                if op.kind == Kind.U:
                    self._updates[rank, op.stage].append(index)
                    continue
                self._rank_and_index[op] = rank, index
                if op.kind == Kind.F:
                    self._first.setdefault((rank, op.stage, self.window_of(op)), op)

    def window_of(self, op: Op) -> int:
        """Return the index of the update window of an operation's micro-batch."""
        return op.microbatch // self.window

    def newest(self, op: Op) -> int:
        """Return the newest weight version that an operation can read: the number of updates of its
        stage that come before it on its rank."""
        rank, index = self._rank_and_index[op]
        return bisect_left(self._updates[rank, op.stage], index)

    def forward(self, op: Op, stage: int | None = None) -> Op:
        """Return the forward of an operation's micro-batch, at the operation's stage or at
        `stage`."""
        return Op(Kind.F, op.stage if stage is None else stage, op.microbatch)

    def first(self, op: Op) -> Op:
        """Return the first forward of an operation's update window at its stage, on its rank."""
        return self._first[self._rank_and_index[op][0], op.stage, self.window_of(op)]

    def staleness(self, stage: int, window: int) -> Fraction:
        """Return the mean staleness of the newest weights at a stage's forwards of an update
        window, relative to the version that the window's update changes."""
        numbers = range(window * self.window, (window + 1) * self.window)
        behind = [window - self.newest(Op(Kind.F, stage, number)) for number in numbers]
        return Fraction(sum(behind), len(behind))


Reads = Callable[[Lists, Op], Read]
ALTERNATING = ("1f1b", "eager_1f1b")
"""Names of the orders with one rank per stage and one stage per rank."""


@dataclass(frozen=True)
class VersionPolicy:
    """A version policy: which weights operations read, and when a stage is updated."""

    name: str
    reads: Reads
    orders: tuple[str, ...] = ALTERNATING
    follows: bool = True
    """Whether a backward reads the weights that its forward has read."""
    late: bool = False
    """Whether a stage is updated as late as possible, so that the window's gradient norm is ready:
    before the first forward that reads the new version, but not after the next window's last
    backward."""
    waits: bool = False
    """Whether an update waits for totals over all ranks, for clipping by the global norm."""
    agrees: bool = False
    """Whether all forwards and backwards of a micro-batch read the same version at all stages."""


def stash(lists: Lists, op: Op) -> Read:
    """Read the newest weights in the forward, and the same version in the backward. With update
    windows of one micro-batch, rank r of p keeps p - r versions."""
    return Read(lists.newest(lists.forward(op)))


def vertical(lists: Lists, op: Op) -> Read:
    """Read, on all ranks, the version that the micro-batch's forward has read at stage 0."""
    return Read(lists.newest(lists.forward(op, stage=0)))


def double_buffer(lists: Lists, op: Op) -> Read:
    """Read, on all ranks, the version before the one that the window's update changes, so that two
    versions suffice."""
    return Read(max(0, lists.window_of(op) - 1))


def double_group(lists: Lists, op: Op) -> Read:
    """Read one version in a whole update window: the newest one at the window's first forward."""
    return Read(lists.newest(lists.first(op)))


def latest(lists: Lists, op: Op) -> Read:
    """Read the newest version, so that only one version is kept."""
    return Read(lists.newest(op))


def predict(lists: Lists, op: Op) -> Read:
    """Read predicted weights in the forward, and the newest version in the backward (PipeOptim).

    The prediction goes from the newest version at the window's first forward to the version that
    the window's update will change. The backward reads this version.
    """
    if op.kind != Kind.F:
        return Read(lists.newest(op))
    newest = lists.newest(lists.first(op))
    return Read(newest, _behind(lists, op))


def predict_round_trip(lists: Lists, op: Op) -> Read:
    """Read weights predicted for the time when the micro-batch ends at the first stage. With update
    windows of one micro-batch, rank r predicts its backward's weights floor(r/2) updates ahead
    (SpecTrain, XPipe). With m micro-batches per window this project predicts floor(floor(r/2) / m)
    updates ahead."""
    later = Fraction(op.stage // 2 // lists.window)
    if op.kind != Kind.F:
        return Read(lists.newest(op), later)
    return Read(lists.newest(lists.first(op)), later + _behind(lists, op))


def correct(lists: Lists, op: Op) -> Read:
    """Read the newest weights; in the backward, move them back by the forwards' mean staleness."""
    if op.kind == Kind.F:
        return Read(lists.newest(op))
    return Read(lists.newest(op), -lists.staleness(op.stage, lists.window_of(op)))


def _behind(lists: Lists, op: Op) -> Fraction:
    """Return the staleness of the newest weights at the first forward of an operation's window,
    relative to the version that the window's update changes."""
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
    """Return the policy `name`. `horizon` selects the function of the policy "predict": "update"
    (:func:`predict`) or "round_trip" (:func:`predict_round_trip`).

    Raises:
        ScheduleError: an unknown name.
    """
    if name not in POLICIES:
        raise ScheduleError(f"weights {name!r} are unknown; known ones are {', '.join(POLICIES)}")
    found = POLICIES[name]
    return replace(found, reads=HORIZONS[horizon]) if name == "predict" else found
