"""ZB-1p and ZB-2p: zero bubble within a memory limit (Qi et al., 2401.10241, section 3.1).

The heuristic runs the pipeline once, rank by rank and micro-batch by micro-batch:

1. Every rank runs its first F. From the last rank back, each then adds forwards while it has room
   and its first I has not arrived; fewer than the rank above, which feeds it.
2. For each further micro-batch every rank may take one F, and every rank takes one I. Before
   either, W run to make room, where they end before the input arrives, and where waiting for it
   would make this rank the one with the most idle time.
3. The W that are left.

It does so for all settings of three :class:`Flags`, and takes the best order.
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
    memory_limit: float | Fraction | None = None,
    freed: float | Fraction = 0,
) -> Schedule:
    """The heuristic at the memory of 1F1B: p micro-batches per rank, or `memory_limit`.

    Idle time, for m >= 2p, W <= F, W <= I and zero latency: (p-1)(F+I-W). The paper counts memory
    weighted, a part of an activation being free after I; give that share as `freed`. By default a
    micro-batch counts as one from F to W, as long as its tensors are kept.

    Args:
        cost: what the order is made for; default: equal times, no latency.
        memory_limit: micro-batches that a rank may hold, at least 1.
        freed: share of a micro-batch that I frees, from 0 to 1; W frees the rest.

    Raises:
        ScheduleError: no room for one micro-batch, a share that is none, or a cost that does not
            fit the stages.
    """
    limit = ranks if memory_limit is None else memory_limit
    return _best("zb_1p", ranks, microbatches, cost, limit, freed)


@register("zb_2p")
def zb_2p(
    ranks: int,
    microbatches: int,
    cost: Cost | None = None,
    memory_limit: float | Fraction | None = None,
    freed: float | Fraction = 0,
) -> Schedule:
    """The heuristic at twice the memory of 1F1B: 2p micro-batches per rank, or `memory_limit`.

    At equal times, zero latency and m >= 2p no rank idles within its own span, while the makespan
    is that of zb_h1. The limit of the paper's table is weighted, with a share `freed` of 0.634 or
    0.568: it holds 3p to 4.5p micro-batches from F to W. See :func:`zb_1p` for the arguments.
    """
    limit = 2 * ranks if memory_limit is None else memory_limit
    return _best("zb_2p", ranks, microbatches, cost, limit, freed)


@dataclass(frozen=True)
class Flags:
    """Choices that the heuristic tries both ways."""

    fill: bool
    """In the warm-up, one forward more, though it delays the first I."""
    inputs_first: bool
    """A rank two forwards ahead of the next one may skip one that would delay its next I."""
    eager: bool
    """W runs in every gap."""


def _best(
    name: str,
    ranks: int,
    microbatches: int,
    cost: Cost | None,
    limit: float | Fraction,
    freed: float | Fraction,
) -> Schedule:
    """The order with the shortest span that is not worse than zb_h1, where that fits.

    The flags are chosen on at most 4p micro-batches; by then the order repeats itself.
    """
    if limit < 1:
        raise ScheduleError(
            f"schedule {name}: memory_limit must be at least 1 micro-batch, not {limit}"
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
    """The memory limit, in grains."""

    limit: int
    whole: int
    """Grains that F takes for one micro-batch."""
    rest: int
    """Those of them that W frees, and not I already."""

    @classmethod
    def of(cls, limit: Fraction, freed: Fraction) -> "_Memory":
        """From micro-batches, and the share that I frees."""
        grains = per_unit((limit, freed))
        return cls(*(whole(amount, grains) for amount in (limit, 1, 1 - freed)))


def _score(schedule: Schedule, cost: Cost, ceiling: Time) -> tuple[bool, Time, Time]:
    """The least is the best: no longer than the ceiling, then the shortest span."""
    timeline = simulate(schedule, cost)
    return timeline.makespan > ceiling, max(timeline.spans), timeline.makespan


class _Pipeline:
    """One run of the heuristic. Rank r has stage r; all lists of times are by rank."""

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
        """When each F ended."""
        self.inputs: list[list[Time]] = [[] for _ in range(ranks)]
        """When each I ended."""
        self.weights = [0] * ranks
        """How many W have run."""
        self.alive = [0] * ranks
        """Activations alive, in grains."""
        self.adds = {
            Kind.F: memory.whole,
            Kind.I: memory.rest - memory.whole,
            Kind.W: -memory.rest,
        }

    def run(self) -> tuple["array[int]", ...]:
        """The list of every rank."""
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
        """The forwards before the first I."""
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
        """At most one F per rank, before the I of a micro-batch.

        A rank that has not run the F of that micro-batch must take one. One that takes none makes
        the ranks above wait too, so that none gets far ahead of the next.
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
        """Whether an F would delay the next I, and leaving it out costs less than the worst rank
        idles."""
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
        """Run the next F, after the W that its memory and its arrival call for."""
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
        """Micro-batches that a rank may have between F and I, when all W have run that can."""
        return self.memory.limit // self.memory.whole

    def excess(self, rank: int) -> int:
        """Grains by which the next F would exceed the limit."""
        return self.alive[rank] + self.memory.whole - self.memory.limit

    def input(self, rank: int) -> None:
        """Run the next I, after the W that its arrival calls for."""
        ends = self.inputs[rank]
        arrival: Time = 0
        if rank < self.ranks - 1:
            arrival = self.inputs[rank + 1][len(ends)] + self.up[rank]
        self.fill(rank, arrival)
        self.put(rank, Kind.I, len(ends), arrival)
        ends.append(self.now[rank])

    def fill(self, rank: int, arrival: Time) -> None:
        """Run W until the next input arrives."""
        spent = self.time[Kind.W][rank]
        while self.waits(rank) and self.now[rank] + spent <= arrival:
            self.weight(rank)
        gap = arrival - self.now[rank]
        worst = self.idle[rank] + gap > max(self.idle)
        if self.waits(rank) and gap > 0 and (self.flags.eager or worst):
            self.weight(rank)

    def waits(self, rank: int) -> bool:
        """Whether a W could run."""
        return self.weights[rank] < len(self.inputs[rank])

    def weight(self, rank: int) -> None:
        """Run the next W."""
        self.put(rank, Kind.W, self.weights[rank], 0)
        self.weights[rank] += 1

    def put(self, rank: int, kind: Kind, microbatch: int, arrival: Time) -> None:
        """Run an operation as soon as its input is there."""
        if arrival > self.now[rank]:
            if self.forwards[rank]:
                self.idle[rank] += arrival - self.now[rank]
            self.now[rank] = arrival
        self.now[rank] += self.time[kind][rank]
        self.alive[rank] += self.adds[kind]
        self.ops[rank].append(pack(kind, rank, microbatch))
