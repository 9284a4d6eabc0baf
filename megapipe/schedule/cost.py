"""Costs of operations and messages, in any unit of time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import WORK
from megapipe.schedule.placement import Placement

Time = int | float | Fraction
"""A time; whole numbers and fractions stay exact through the simulator."""
PerStage = Time | tuple[Time, ...]
PerLink = Time | Mapping[tuple[int, int], Time]


class GradBucket(NamedTuple):
    """One bucket of a stage's gradients, reduced as soon as its gradients are complete."""

    after: Time
    """Time at which the bucket's gradients are complete, as a fraction of the stage's last W or B:
    from 0 (its start) to 1 (its end)."""
    share: Time
    """The bucket's share of the time of the stage's reduction."""


Buckets = tuple[tuple[GradBucket, ...], ...]
"""The buckets of each stage, in the order in which they are reduced."""
WHOLE = (GradBucket(1, 1),)
"""A single bucket: all gradients of a stage, reduced after the stage's last W or B."""


@dataclass(frozen=True)
class Cost:
    """Times of operations, messages and collectives.

    F, I, W, B and R are times of one operation on a whole micro-batch at one virtual stage: one
    number for all stages or a tuple with a number per stage. An operation on a slice or a smaller
    micro-batch takes proportionally less."""

    F: PerStage = 1
    I: PerStage = 1  # noqa: E741
    W: PerStage = 1
    B: PerStage | None = None
    """Time of the fused backward; default: I + W."""
    R: PerStage | None = None
    """Time of recomputation; default: F."""
    update: PerStage = 0
    """Time of one update of a stage's weights, in a no-flush schedule."""
    overlap_factor: Time = 1
    """Time of a joined pair of operations (:attr:`.Op.joined`) as a multiple of the sum of their
    times: below 1 if one operation computes while the other waits."""
    latency: PerLink = 0
    """Time from the end of an operation to the arrival of its message on another rank: for all
    pairs of ranks, or by (source, destination); 0 for pairs that are not listed. Messages within a
    rank take no time."""
    bandwidth: PerLink | None = None
    """Message size that a link sends per unit of time, for all pairs or by (source, destination);
    infinite by default, and for pairs that are not listed."""
    message: Time = 0
    """Size of the message of a whole micro-batch, in the unit of bandwidth."""
    overlap: bool = True
    """Whether messages are in flight while ranks compute. If false, a sender waits for its
    message."""
    slices: tuple[Time, ...] | None = None
    """Share of an operation's time that each slice of a sequence takes; default: equal shares. The
    shares add up to more than 1 if slicing costs time."""
    jitter: float = 0.0
    """Maximum random change of an operation's time, up or down, as a fraction of this time."""
    seed: int = 0
    """Seed of the jitter's random numbers."""
    reduce: PerStage = 0
    """Time of one reduction of a stage's gradients over its data-parallel peers."""
    buckets: Buckets = ()
    """Buckets of each stage's reduction; the last bucket is complete when the stage's last W or B
    ends. By default, and always if a stage has several holders, the stage is reduced as a whole."""
    gather: PerStage = 0
    """Time of one all-gather of a stage's parameters from its data-parallel peers."""

    @classmethod
    def full_rank(
        cls,
        placement: Placement,
        *,
        F: Time = 1,
        I: Time = 1,  # noqa: E741
        W: Time = 1,
        B: Time | None = None,
        R: Time | None = None,
        latency: PerLink = 0,
        reduce: Time = 0,
        gather: Time = 0,
        update: Time = 0,
    ) -> "Cost":
        """Build costs from the times of a full rank (1 / ranks of the model). Each stage gets its
        share of these times (:attr:`.Placement.stage_shares`)."""
        shares = placement.stage_shares
        alike = len(set(shares)) == 1

        def share(time: Time) -> PerStage:
            own = tuple(
                time * float(share) if isinstance(time, float) else plain(time * share)
                for share in shares[: 1 if alike else None]
            )
            return own[0] if alike else own

        return cls(
            F=share(F),
            I=share(I),
            W=share(W),
            B=None if B is None else share(B),
            R=None if R is None else share(R),
            latency=latency,
            reduce=share(reduce),
            gather=share(gather),
            update=share(update),
        )

    def table(self, stages: int) -> tuple[tuple[Time, ...], ...]:
        """Return the times by kind (F, B, I, W, R, U) and stage.

        Raises:
            ScheduleError: a tuple that is not of length stages, a negative time or factor, or a
                jitter above 1.
        """
        given = {kind.name: getattr(self, kind.name) for kind in WORK}
        for name in ("overlap_factor", "jitter"):
            if getattr(self, name) < 0:
                raise ScheduleError(f"cost {name}: {getattr(self, name)} is negative")
        if self.jitter > 1:
            raise ScheduleError(f"cost jitter: {self.jitter} is more than the whole time, 1")
        if self.slices is not None and min(self.slices) < 0:
            raise ScheduleError(f"cost slices: {min(self.slices)} is negative")
        rows: dict[str, tuple[Time, ...]] = {}
        for name, value in given.items():
            if value is None:
                continue
            rows[name] = _row(name, value, stages)
        rows.setdefault("B", tuple(i + w for i, w in zip(rows["I"], rows["W"], strict=True)))
        rows.setdefault("R", rows["F"])
        return (*(rows[kind.name] for kind in WORK), _row("update", self.update, stages))

    def per_stage(self, what: Literal["reduce", "gather"], stages: int) -> tuple[Time, ...]:
        """Return the times of the collective `what`, reduction or all-gather, per stage.

        Raises:
            ScheduleError: a tuple that is not of length stages, or a negative time.
        """
        return _row(what, getattr(self, what), stages)

    def buckets_of(self, stages: int) -> Buckets:
        """Return the buckets of each stage's reduction.

        Raises:
            ScheduleError: not one list of buckets per stage, shares that do not add up to 1, or
                buckets that are not in the order of `after`, with 1 for the last bucket.
        """
        if self.buckets and len(self.buckets) != stages:
            raise ScheduleError(
                f"cost buckets: {len(self.buckets)} lists for {stages} stages; give one per stage"
            )
        for stage, own in enumerate(self.buckets):
            times = [bucket.after for bucket in own]
            whole = abs(float(sum(bucket.share for bucket in own)) - 1) < 1e-9
            if not (own and whole and times == sorted(times) and times[0] >= 0 and times[-1] == 1):
                raise ScheduleError(
                    f"cost buckets: stage {stage}: the shares must add up to 1, and the times "
                    "`after` must ascend from at least 0 to 1"
                )
        return self.buckets or (WHOLE,) * stages

    def has_replicas(self, stages: int) -> bool:
        """Whether gathers or reductions take time at any stage.

        Raises:
            ScheduleError: a tuple that is not of length stages, or a negative time.
        """
        return any((*self.per_stage("gather", stages), *self.per_stage("reduce", stages)))

    def without_replicas(self) -> "Cost":
        """Return these costs without the times of gathers and reductions."""
        return replace(self, reduce=0, gather=0)

    def link(self, src: int, dst: int, size: Fraction = Fraction(1)) -> Time:
        """Return the time that a message of `size` micro-batches takes from one rank to another.

        Raises:
            ScheduleError: a negative latency, or a bandwidth that is not positive.
        """
        if src == dst:
            return 0
        time = self.latency
        if isinstance(time, Mapping):
            time = time.get((src, dst), 0)
        if time < 0:
            raise ScheduleError(f"cost latency: {time} is negative")
        rate = self.bandwidth
        if isinstance(rate, Mapping):
            rate = rate.get((src, dst))
        if rate is None:
            return time
        if rate <= 0:
            raise ScheduleError(f"cost bandwidth: {rate} from rank {src} to {dst} is not above 0")
        return plain(time + ratio(self.message * size, rate))


def equal_buckets(count: int, stages: int) -> Buckets:
    """Return `count` equal buckets per stage, complete at equal intervals in its last W or B."""
    part = Fraction(1, count)
    return (tuple(GradBucket(plain(part * (i + 1)), plain(part)) for i in range(count)),) * stages


def _row(name: str, value: PerStage, stages: int) -> tuple[Time, ...]:
    """Check a cost that is given for all stages or per stage; return it per stage."""
    row = value if isinstance(value, tuple) else (value,) * stages
    if len(row) != stages:
        raise ScheduleError(
            f"cost {name}: {len(row)} times for {stages} stages; give one per stage"
        )
    if min(row) < 0:
        raise ScheduleError(f"cost {name}: {min(row)} is negative")
    return row


def plain(time: Time) -> Time:
    """Return a number, as an int if it is whole."""
    if isinstance(time, Fraction) and time.denominator == 1:
        return time.numerator
    return time


def ratio(part: Time, whole: Time) -> Time:
    """Return part / whole, exact for whole numbers and fractions."""
    if isinstance(part, float) or isinstance(whole, float):
        return float(part / whole)
    return Fraction(part) / Fraction(whole)
