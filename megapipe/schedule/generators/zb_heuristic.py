"""ZB-1p and ZB-2p: zero bubble within a memory limit (Qi et al., 2401.10241, section 3.1).

The heuristic simulates the pipeline, rank by rank and micro-batch by micro-batch:

1. Every rank runs its first F. From the last rank back, each rank then adds forwards while it has
   memory and the input of its first I has not arrived. Rank r normally adds fewer than rank r-1.
2. Every rank runs one I for each micro-batch, and at most one F between two I. Before an F or I, a
   rank runs W in three cases: to free memory for the F, if the W ends before the input arrives, or
   if waiting would make the rank the one with the most idle time.
3. Every rank runs its remaining W.

The heuristic runs once for each setting of its three :class:`Flags`; the best order is kept.
"""

from array import array
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.cost import Cost, Time
from megapipe.schedule.generators.registry import register
from megapipe.schedule.generators.zero_bubble import zb_h1
from megapipe.schedule.ir import Kind, Schedule, pack
from megapipe.schedule.memory import most_held
from megapipe.schedule.placement import loop
from megapipe.schedule.timing.simulate import simulate
from megapipe.schedule.timing.ticks import per_unit, whole
from megapipe.schedule.timing.times import in_ticks


@register("zb_1p")
def zb_1p(
    ranks: int,
    microbatches: int,
    cost: Cost | None = None,
    activation_limit: float | Fraction | None = None,
    freed: float | Fraction = 0,
) -> Schedule:
    """Run the heuristic at the memory of 1F1B: p micro-batches per rank, or `activation_limit`.

    Idle time, for m >= 2p, W <= F, W <= I and zero latency: (p-1)(F+I-W). In the paper, I frees a
    share of an activation; pass this share as `freed`. By default an activation counts fully from F
    to W.

    Args:
        cost: costs for which the order is made; default: equal times, no latency.
        activation_limit: maximum number of micro-batches with activations on a rank, at least 1.
        freed: share of an activation that I frees, from 0 to 1; W frees the rest.

    Raises:
        ScheduleError: `activation_limit` or `freed` is out of range, or the cost does not fit the
            stages.
    """
    limit = ranks if activation_limit is None else activation_limit
    return _best("zb_1p", ranks, microbatches, cost, limit, freed)


@register("zb_2p")
def zb_2p(
    ranks: int,
    microbatches: int,
    cost: Cost | None = None,
    activation_limit: float | Fraction | None = None,
    freed: float | Fraction = 0,
) -> Schedule:
    """Run the heuristic at twice the memory of 1F1B: 2p micro-batches, or `activation_limit`.

    At equal times, zero latency and m >= 2p no rank idles between its first and last operation,
    while the makespan is zb_h1's. In the paper's table, I frees 0.634 or 0.568 of an activation
    (`freed`), so that 3p to 4.5p micro-batches are between F and W. The arguments are described at
    :func:`zb_1p`.
    """
    limit = 2 * ranks if activation_limit is None else activation_limit
    return _best("zb_2p", ranks, microbatches, cost, limit, freed)


@dataclass(frozen=True)
class Flags:
    """Settings of the heuristic; each is tried with both values."""

    fill: bool
    """Whether the warm-up includes a last forward that delays the rank's first I."""
    inputs_first: bool
    """Whether a rank can skip an F that would delay its next I, if it is at least two forwards
    ahead of the next rank."""
    eager: bool
    """Whether a rank that has to wait always runs a W, even if the awaited input arrives first."""


def _best(
    name: str,
    ranks: int,
    microbatches: int,
    cost: Cost | None,
    limit: float | Fraction,
    freed: float | Fraction,
) -> Schedule:
    """Return the heuristic's best order, or zb_h1 if it keeps the memory limit and is better.

    Orders are compared by their longest span; an order with a makespan above zb_h1's is worse than
    any other. The flags are chosen with at most 4p micro-batches; by then the order repeats itself.
    """
    if limit < 1:
        raise ScheduleError(
            f"schedule {name}: activation_limit must be at least 1 micro-batch, not {limit}"
        )
    cost, _ = in_ticks(loop(ranks), cost or Cost())
    if not 0 <= freed <= 1:
        raise ScheduleError(f"schedule {name}: freed must be from 0 to 1, not {freed}")
    memory = _Memory.of(Fraction(min(limit, microbatches)), Fraction(freed))

    def attempt(microbatches: int, flags: Flags) -> Schedule:
        ops = _Pipeline(ranks, microbatches, cost, memory, flags).run()
        return Schedule(name, loop(ranks), microbatches, ops, tuple(map(most_held, ops)))

    few = min(microbatches, 4 * ranks)
    ceiling = simulate(zb_h1(ranks, few), cost).makespan
    settings = [Flags(*setting) for setting in product((False, True), repeat=3)]
    flags = min(settings, key=lambda flags: _score(attempt(few, flags), cost, ceiling))
    found = attempt(microbatches, flags)
    plain = replace(zb_h1(ranks, microbatches), name=name)
    if min(ranks, microbatches) > limit:
        return found
    ceiling = simulate(plain, cost).makespan
    return min(found, plain, key=lambda schedule: _score(schedule, cost, ceiling))


class _Memory(NamedTuple):
    """Memory amounts in grains. A grain is a share of a micro-batch that divides all amounts."""

    limit: int
    whole: int
    """Grains that the F of one micro-batch allocates."""
    rest: int
    """Grains that the W of one micro-batch frees; its I frees the others."""

    @classmethod
    def of(cls, limit: Fraction, freed: Fraction) -> "_Memory":
        """Convert a limit in micro-batches, and the share of a micro-batch that I frees."""
        grains = per_unit((limit, freed))
        return cls(*(whole(amount, grains) for amount in (limit, 1, 1 - freed)))


def _score(schedule: Schedule, cost: Cost, ceiling: Time) -> tuple[bool, Time, Time]:
    """Return a score to minimize: whether the makespan is above `ceiling`, then the longest span,
    then the makespan."""
    timeline = simulate(schedule, cost)
    return timeline.makespan > ceiling, max(timeline.spans), timeline.makespan


class _Pipeline:
    """One run of the heuristic. Rank r has stage r; all lists are indexed by rank."""

    def __init__(
        self, ranks: int, microbatches: int, cost: Cost, memory: _Memory, flags: Flags
    ) -> None:
        self.ranks, self.microbatches = ranks, microbatches
        self.memory, self.flags = memory, flags
        self.time = cost.table(ranks)
        self.down = [0] + [cost.link(rank - 1, rank) for rank in range(1, ranks)]
        self.up = [cost.link(rank + 1, rank) for rank in range(ranks - 1)] + [0]
        self.ops = [array("q") for _ in range(ranks)]
        self.now: list[Time] = [0] * ranks
        self.idle: list[Time] = [0] * ranks
        self.forwards: list[list[Time]] = [[] for _ in range(ranks)]
        """Ends of the F that each rank has run."""
        self.inputs: list[list[Time]] = [[] for _ in range(ranks)]
        """Ends of the I that each rank has run."""
        self.weights = [0] * ranks
        """Number of W that each rank has run."""
        self.alive = [0] * ranks
        """Activations alive on each rank, in grains."""
        self.adds = {
            Kind.F: memory.whole,
            Kind.I: memory.rest - memory.whole,
            Kind.W: -memory.rest,
        }

    def run(self) -> tuple["array[int]", ...]:
        """Return the list of every rank."""
        self.warm_up()
        for microbatch in range(self.microbatches):
            if microbatch:
                self.forward_round(microbatch)
            for rank in reversed(range(self.ranks)):
                self.input(rank)
        for rank in range(self.ranks):
            while self.weights[rank] < self.microbatches:
                self.weight(rank)
        return tuple(self.ops)

    def warm_up(self) -> None:
        """Run the forwards before the first I."""
        for rank in range(self.ranks):
            self.forward(rank)
        more = [0] * self.ranks
        arrival: Time = 0
        for rank in reversed(range(self.ranks)):
            end, spent = self.now[rank], self.time[Kind.F][rank]
            if rank < self.ranks - 1:
                arrival += self.up[rank]
                while more[rank] + 1 < min(self.microbatches, self.most) and (
                    end < arrival if self.flags.fill else end + spent <= arrival
                ):
                    more[rank] += 1
                    end += spent
            arrival = max(end, arrival) + self.time[Kind.I][rank]
        for rank in range(1, self.ranks):
            fed = more[rank - 1]
            all_of_them = more[rank] == self.microbatches - 1
            more[rank] = min(more[rank], fed if all_of_them else max(fed - 1, 0))
        for rank in range(self.ranks):
            for _ in range(more[rank]):
                self.forward(rank)

    def forward_round(self, microbatch: int) -> None:
        """Run at most one F per rank, before the I of a micro-batch.

        A rank that has not run the F of the micro-batch must run one. A rank that skips an F makes
        the ranks before it skip too, so that no rank gets far ahead of the next one.
        """
        takes = [len(ends) < self.microbatches for ends in self.forwards]
        for rank in reversed(range(self.ranks - 1)):
            if takes[rank] and len(self.forwards[rank]) > microbatch:
                takes[rank] = takes[rank + 1] and not (self.flags.inputs_first and self.skips(rank))
        for rank in range(self.ranks):
            count = len(self.forwards[rank])
            fed = rank == 0 or count < len(self.forwards[rank - 1])
            if takes[rank] and fed and count - len(self.inputs[rank]) < self.most:
                self.forward(rank)

    def skips(self, rank: int) -> bool:
        """Whether a rank skips its next F: the F would delay the next I, the rank is at least two
        forwards ahead of the next rank, and waiting would not make it the rank that idles most."""
        count, now, below = len(self.forwards[rank]), self.now[rank], rank + 1
        if count < len(self.forwards[below]) + 2:
            return False
        work = self.time[Kind.F][below] + self.time[Kind.I][below]
        arrival = self.now[below] + work + self.up[rank]
        if now >= arrival:
            return True
        crowded = max(0, -(-self.excess(rank) // max(1, self.memory.rest)))
        if now + self.time[Kind.F][rank] + crowded * self.time[Kind.W][rank] <= arrival:
            return False
        return self.idle[rank] + arrival - now <= max(self.idle)

    def forward(self, rank: int) -> None:
        """Run the next F, after the W that free memory for it or end before its input arrives."""
        ends = self.forwards[rank]
        arrival: Time = 0
        if rank:
            arrival = self.forwards[rank - 1][len(ends)] + self.down[rank]
        while self.excess(rank) > 0:
            self.weight(rank)
        self.fill(rank, arrival)
        self.put(rank, Kind.F, len(ends), arrival)
        ends.append(self.now[rank])

    @property
    def most(self) -> int:
        """Maximum number of micro-batches between F and I on a rank with no W left to run."""
        return self.memory.limit // self.memory.whole

    def excess(self, rank: int) -> int:
        """Return the number of grains by which the next F would exceed the memory limit."""
        return self.alive[rank] + self.memory.whole - self.memory.limit

    def input(self, rank: int) -> None:
        """Run the next I, after the W that end before its input arrives."""
        ends = self.inputs[rank]
        arrival: Time = 0
        if rank < self.ranks - 1:
            arrival = self.inputs[rank + 1][len(ends)] + self.up[rank]
        self.fill(rank, arrival)
        self.put(rank, Kind.I, len(ends), arrival)
        ends.append(self.now[rank])

    def fill(self, rank: int, arrival: Time) -> None:
        """Run W while the rank waits for the next input, which arrives at time `arrival`."""
        spent = self.time[Kind.W][rank]
        while self.waits(rank) and self.now[rank] + spent <= arrival:
            self.weight(rank)
        gap = arrival - self.now[rank]
        worst = self.idle[rank] + gap > max(self.idle)
        if self.waits(rank) and gap > 0 and (self.flags.eager or worst):
            self.weight(rank)

    def waits(self, rank: int) -> bool:
        """Whether a W of the rank has its input and has not run."""
        return self.weights[rank] < len(self.inputs[rank])

    def weight(self, rank: int) -> None:
        """Run the next W."""
        self.put(rank, Kind.W, self.weights[rank], 0)
        self.weights[rank] += 1

    def put(self, rank: int, kind: Kind, microbatch: int, arrival: Time) -> None:
        """Run an operation as soon as its input has arrived."""
        if arrival > self.now[rank]:
            if self.forwards[rank]:
                self.idle[rank] += arrival - self.now[rank]
            self.now[rank] = arrival
        self.now[rank] += self.time[kind][rank]
        self.alive[rank] += self.adds[kind]
        self.ops[rank].append(pack(kind, rank, microbatch))
