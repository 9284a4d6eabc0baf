"""Which pipeline rank holds each virtual stage of the model."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from megapipe.errors import ScheduleError


@dataclass(frozen=True)
class Placement:
    """A map from (direction, stage) to pipeline rank.

    Stages are numbered 0 .. stages-1 in the order in which a micro-batch visits them forward. A
    second direction has the same stages on other ranks. In bidirectional pipelines its ranks are in
    opposite order; with replicated stages only some stages are on another rank.

    Raises:
        ScheduleError: a rank out of range, a rank without a stage, or directions of unequal length.
    """

    ranks: int
    table: tuple[tuple[int, ...], ...]
    """table[direction][stage] is the rank; for a spanning stage it is 0."""
    spanning: frozenset[int] = frozenset()
    """Stages that span all ranks: each rank has a shard of their weights, and their F, B and I run
    on all ranks at once, as an embedding under tensor parallelism (the M shape of Tessel,
    2311.15269). Their W runs on each rank by itself. They need a placement with one direction."""

    def __post_init__(self) -> None:
        if not self.table or not self.table[0]:
            raise ScheduleError("placement: it has no stage; at least one is needed")
        used = set()
        for direction, row in enumerate(self.table):
            if len(row) != len(self.table[0]):
                raise ScheduleError(
                    f"placement: direction {direction} has {len(row)} stages, direction 0 has "
                    f"{len(self.table[0])}; all need the same number"
                )
            for stage, rank in enumerate(row):
                if not 0 <= rank < self.ranks:
                    raise ScheduleError(
                        f"placement: stage {stage} of direction {direction} is on rank {rank}; "
                        f"ranks go from 0 to {self.ranks - 1}"
                    )
                used.add(rank)
        self._check_spanning()
        if len(used) < self.ranks and not self.spanning:
            idle = min(set(range(self.ranks)) - used)
            raise ScheduleError(f"placement: rank {idle} has no stage; every rank needs one")

    def _check_spanning(self) -> None:
        for stage in sorted(self.spanning):
            if not 0 <= stage < self.stages:
                raise ScheduleError(
                    f"placement: spanning stage {stage} does not exist; stages go from 0 to "
                    f"{self.stages - 1}"
                )
            if len(self.table) > 1 or self.table[0][stage] != 0:
                raise ScheduleError(
                    f"placement: stage {stage} spans all ranks; the table needs one direction, and "
                    "rank 0 for this stage"
                )

    @property
    def stages(self) -> int:
        """Number of virtual stages."""
        return len(self.table[0])

    def rank_of(self, stage: int, direction: int = 0) -> int:
        """Return the rank that holds a stage in a direction."""
        return self.table[direction][stage]

    def direction_stages(self, rank: int, direction: int) -> tuple[int, ...]:
        """Return the stages (model chunks) that a rank holds in a direction, ascending."""
        row = self.table[direction]
        return tuple(stage for stage, at in enumerate(row) if at == rank or stage in self.spanning)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages (model chunks) that a rank holds in any direction, ascending."""
        directions = range(len(self.table))
        return tuple(sorted({s for each in directions for s in self.direction_stages(rank, each)}))

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the ranks that hold a stage in any direction, ascending."""
        if stage in self.spanning:
            return tuple(range(self.ranks))
        return tuple(sorted({row[stage] for row in self.table}))

    def messages(self, source: int, target: int, direction: int = 0) -> list[tuple[int, int]]:
        """Return the (source, destination) ranks of the messages from one stage to its neighbour.

        A spanning stage has its output on all ranks, so it sends none. It needs its input on all
        ranks.
        """
        if source in self.spanning:
            return []
        sender, receiver = self.table[direction][source], self.table[direction][target]
        receivers = range(self.ranks) if target in self.spanning else (receiver,)
        return [(sender, rank) for rank in receivers if rank != sender]

    @property
    def stage_shares(self) -> tuple[Fraction, ...]:
        """Size of each stage in full ranks; a full rank is 1 / `ranks` of the model.

        Stages with equally many holders are of equal size. A stage with c times as many holders is
        c times as large: its holders alternate micro-batches, so all ranks have equal work. Of a
        spanning stage it is the size of one rank's shard.
        """
        holders = [len(self.holders(stage)) for stage in range(self.stages)]
        return tuple(
            Fraction(self.ranks * (1 if stage in self.spanning else count), sum(holders))
            for stage, count in enumerate(holders)
        )


def loop(ranks: int, chunks: int = 1) -> Placement:
    """Put stage s on rank s mod ranks: a plain pipeline with one chunk per rank, an interleaved one
    with more (Narayanan et al., 2104.04473)."""
    _at_least_one(ranks=ranks, chunks=chunks)
    return Placement(ranks, (tuple(range(ranks)) * chunks,))


def vee(ranks: int) -> Placement:
    """Put stages r and 2*ranks-1-r on rank r, in the shape of a V (ZB-V, 2401.10241)."""
    _at_least_one(ranks=ranks)
    return Placement(ranks, ((*range(ranks), *reversed(range(ranks))),))


def wave(ranks: int, waves: int = 1) -> Placement:
    """Chain `waves` V shapes (:func:`vee`): 2*waves chunks per rank (Hanayo, 2308.15762)."""
    _at_least_one(waves=waves)
    return Placement(ranks, (vee(ranks).table[0] * waves,))


def m_shape(ranks: int) -> Placement:
    """Put the first and the last stage (embedding and head) on all ranks, and stage r+1 on rank r
    (M shape of Tessel, 2311.15269)."""
    _at_least_one(ranks=ranks)
    return Placement(ranks, ((0, *range(ranks), 0),), frozenset({0, ranks + 1}))


def mirrored(placement: Placement) -> Placement:
    """Add every direction a second time, with ranks in opposite order (Chimera, 2107.06925)."""
    last = placement.ranks - 1
    opposite = tuple(tuple(last - rank for rank in row) for row in placement.table)
    return Placement(placement.ranks, placement.table + opposite)


def replicated(replicas: Sequence[int]) -> Placement:
    """Give each stage `replicas[stage]` ranks that alternate micro-batches (1F1B-RR, 1806.03377).

    In direction i, a stage with c ranks uses the (i mod c)th of them. Ranks are numbered stage by
    stage. The number of directions is the least common multiple of all c.
    """
    _at_least_one(**{f"replicas[{stage}]": count for stage, count in enumerate(replicas)})
    first = [sum(replicas[:stage]) for stage in range(len(replicas))]
    return Placement(
        sum(replicas),
        tuple(
            tuple(start + turn % count for start, count in zip(first, replicas, strict=True))
            for turn in range(lcm(*replicas))
        ),
    )


def _at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ScheduleError(f"placement: {name} must be at least 1, not {count}")
