"""Costs of operations and messages, in any unit of time."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import WORK
from megapipe.schedule.placement import Placement

Time = int | float | Fraction
"""Whole numbers and fractions stay exact through the simulator."""
PerStage = Time | tuple[Time, ...]
PerLink = Time | Mapping[tuple[int, int], Time]


class GradBucket(NamedTuple):
    """One bucket of a stage's gradients, reduced as soon as its gradients are complete."""

    after: Time
    """How much of the last W or B before the reduction has run by then, from 0 to 1."""
    share: Time
    """The bucket's share of the time of the stage's reduction."""


Buckets = tuple[tuple[GradBucket, ...], ...]
"""The buckets of each stage, in the order in which they are reduced."""
WHOLE = (GradBucket(1, 1),)
"""One bucket: all gradients of a stage, reduced after the operation."""


@dataclass(frozen=True)
class Cost:
    """Time of one operation on a whole micro-batch at one virtual stage: a number for all stages,
    or one per stage. An operation on a part of a micro-batch costs its share."""

    F: PerStage = 1
    I: PerStage = 1  # noqa: E741
    W: PerStage = 1
    B: PerStage | None = None
    """The fused backward; default: I + W."""
    R: PerStage | None = None
    """Recomputation; default: F."""
    update: PerStage = 0
    """One update of a stage's weights, in a schedule that has them."""
    overlap_factor: Time = 1
    """Two joined operations take this factor times the sum of both; it is below 1 where one
    computes while the other waits."""
    latency: PerLink = 0
    """From the end of an operation to the arrival of its message on another rank: for all pairs
    of ranks or by (source, destination), 0 where a pair is not named. Hand-over within a rank is
    free."""
    bandwidth: PerLink | None = None
    """Size sent per unit of time, for all pairs or by (source, destination); infinite by default,
    and for a pair that is not named."""
    message: Time = 0
    """Size of the message of a whole micro-batch, in the unit of bandwidth."""
    overlap: bool = True
    """Messages travel while both ranks compute. If false, the sender waits for the end of each."""
    slices: tuple[Time, ...] | None = None
    """Share of an operation's time that each slice of a sequence takes, in all more than 1 where
    cutting costs time; default: equal ones."""
    jitter: float = 0.0
    """Each operation takes up to this share more or less, drawn anew for each."""
    seed: int = 0
    """Seed of the jitter's random numbers."""
    reduce: PerStage = 0
    """One reduction of a stage's gradients over its data-parallel peers."""
    buckets: Buckets = ()
    """The buckets of each stage's reduction, the last complete when the operation ends. By default,
    and always where a stage has several holders, the stage is reduced as a whole."""
    gather: PerStage = 0
    """One gathering of a stage's parameters from its data-parallel peers."""

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
        """From times for all stages of a rank together: each of its stages takes its share."""
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
        """Times by kind (F, B, I, W, R, U) and stage.

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
        """Times of the reduction, or of the gathering, by stage.

        Raises:
            ScheduleError: a tuple that is not of length stages, or a negative time.
        """
        return _row(what, getattr(self, what), stages)

    def buckets_of(self, stages: int) -> Buckets:
        """Buckets of each stage's reduction.

        Raises:
            ScheduleError: not one list of buckets per stage, or a list whose shares do not add up
                to 1, or that is not in the order of `after`, with 1 for the last bucket.
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
                    f"cost buckets: those of stage {stage} are not shares of 1 that leave in "
                    "order, the last at 1"
                )
        return self.buckets or (WHOLE,) * stages

    def has_replicas(self, stages: int) -> bool:
        """Whether there is anything to gather or reduce.

        Raises:
            ScheduleError: a tuple that is not of length stages, or a negative time.
        """
        return any((*self.per_stage("gather", stages), *self.per_stage("reduce", stages)))

    def without_replicas(self) -> "Cost":
        """These costs with nothing to gather or reduce."""
        return replace(self, reduce=0, gather=0)

    def link(self, src: int, dst: int, size: Fraction = Fraction(1)) -> Time:
        """Time that the message of `size` micro-batches takes from one rank to another.

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
    """`count` equal buckets per stage, complete at equal intervals within the operation."""
    part = Fraction(1, count)
    return (tuple(GradBucket(plain(part * (i + 1)), plain(part)) for i in range(count)),) * stages


def _row(name: str, value: PerStage, stages: int) -> tuple[Time, ...]:
    """A cost of each stage, checked."""
    row = value if isinstance(value, tuple) else (value,) * stages
    if len(row) != stages:
        raise ScheduleError(
            f"cost {name}: {len(row)} times for {stages} stages; give one per stage"
        )
    if min(row) < 0:
        raise ScheduleError(f"cost {name}: {min(row)} is negative")
    return row


def plain(time: Time) -> Time:
    """The same number, as an int where it is a whole fraction."""
    if isinstance(time, Fraction) and time.denominator == 1:
        return time.numerator
    return time


def ratio(part: Time, whole: Time) -> Time:
    """part / whole, exact for whole numbers and fractions."""
    if isinstance(part, float) or isinstance(whole, float):
        return float(part / whole)
    return Fraction(part) / Fraction(whole)
