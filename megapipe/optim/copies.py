"""Values that several ranks hold, which are equal to the bit as long as no device is at fault.

Weights are gathered by all replicas and by all holders of a stage or a tied embedding; every
tensor-parallel rank has all of a norm's weights and of some biases, with their states; without ZeRO
each replica has all states; and weights may have replicas on ranks that do not own them. A bit that
flips in one of these copies is no error to anything that computes with it, so all of them are
looked at now and then: each rank tells all others a checksum of each of its copies.

Two ranks hold the same values if these have the same name: the parameter, what of it, the region
and the range. So no layout has to be known here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megapipe.distributed.mesh import ParallelMesh
from megapipe.layers.weight_replicas import SharedTensor
from megapipe.optim.buffers import ParamRange
from megapipe.optim.checksum import Checksum
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import MASTER
from megapipe.words import count_noun

WEIGHTS = "weights"
_NOTHING = 0
"""A key of no values, which fills up short lists."""


@dataclass(frozen=True)
class ReplicatedValue:
    """Values of one parameter on a rank: its `weights`, as it computes with them, or the range
    [start, stop) of a state or a master."""

    shard: Shard
    entry: ParamRange
    kind: str
    start: int
    stop: int

    @property
    def key(self) -> int:
        """A number that stands for their name, the same on all ranks; not 0."""
        spec = self.entry.spec
        regions = [tuple(region) for _, region in spec.global_regions()]
        return _key(f"{self.kind} {spec.name} {regions} {self.start} {self.stop}")

    def read(self) -> Tensor:
        """The values, flat [n]: a view of what is kept."""
        a, b = self.entry.start + self.start, self.entry.start + self.stop
        shard = self.shard
        if self.kind != WEIGHTS:
            return shard.store.read(self.kind, a - shard.start, b - shard.start)
        if shard.bucket.sharded_weights:
            return shard.weights[shard.local(a, b)]
        return shard.bucket.weights[a:b]

    def describe(self, stages: int) -> str:
        """The values in words."""
        kind = "master weights" if self.kind == MASTER else self.kind
        index = self.shard.bucket.index
        where = "the tied embedding" if index == stages else f"stage {index}"
        return f"{kind} of {self.entry.spec.name} ({where})"


@dataclass(frozen=True)
class HeldReplica:
    """Weights that have replicas, or a replica of them."""

    stage: int
    tensor: SharedTensor
    kind: ClassVar[str] = WEIGHTS

    @property
    def key(self) -> int:
        """As of :class:`ReplicatedValue`."""
        return _key(f"{WEIGHTS} {self.tensor.key}")

    def read(self) -> Tensor:
        """The values, flat [n]: a view of what is kept."""
        return self.tensor.values.view(-1)

    def describe(self, stages: int) -> str:
        """The values in words."""
        return f"{WEIGHTS} of {self.tensor.words} (stage {self.stage})"


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") + 1


def replicated_values(optimizer: Optimizer) -> Iterator[ReplicatedValue]:
    """All values that a rank holds between steps, when the weights are gathered."""
    for shard in (*optimizer.shards, *optimizer.frozen):
        masters = (MASTER,) if shard.store.own_master else ()
        for entry in shard.bucket.entries:
            a, b = max(entry.start, shard.start), min(entry.stop, shard.stop)
            own = (a - entry.start, b - entry.start)
            if not shard.bucket.sharded_weights:
                yield ReplicatedValue(shard, entry, WEIGHTS, 0, entry.stop - entry.start)
            elif a < b:
                yield ReplicatedValue(shard, entry, WEIGHTS, *own)
            if a < b:
                yield from (
                    ReplicatedValue(shard, entry, kind, *own)
                    for kind in (*masters, *shard.store.states)
                )


def held_replicas(optimizer: Optimizer) -> Iterator[HeldReplica]:
    """Weights on a rank that have replicas now, and replicas; those of the last update, for which
    all ranks call it."""
    for stage, of_stage in optimizer.replicas.items():
        for replicas in of_stage:
            replicas.wait_broadcast()
            yield from (HeldReplica(stage, tensor) for tensor in replicas.replicated_weights())


class _Place(NamedTuple):
    """Where in the table of checksums a copy stands."""

    rank: int
    column: int


class ReplicaCheck:
    """Compares what several ranks hold of the state of `optimizer`. Made by all ranks together, and
    anew when weights may have other replicas."""

    def __init__(self, optimizer: Optimizer, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._stages = optimizer.stages
        self._checksum = Checksum(mesh.device)
        everything: list[ReplicatedValue | HeldReplica] = [
            *replicated_values(optimizer),
            *held_replicas(optimizer),
        ]
        longest = int(mesh.gather_numbers(torch.tensor([len(everything)])).max())
        keys = _filled([each.key for each in everything], longest)
        names = mesh.gather_numbers(keys).tolist()
        holders = Counter(key for row in names for key in row if key != _NOTHING)
        places: dict[int, list[_Place]] = {}
        for rank, row in enumerate(names):
            shared = (key for key in row if holders[key] > 1)
            for column, key in enumerate(shared):
                places.setdefault(key, []).append(_Place(rank, column))
        self._length = max((p.column + 1 for each in places.values() for p in each), default=0)
        """Copies of the rank that has most."""
        self.held = [each for each in everything if each.key in places]
        """Values that another rank holds too."""
        self._places = [places[each.key] for each in self.held]
        flat = [place for each in self._places for place in each]
        self._ranks = torch.tensor([place.rank for place in flat], dtype=torch.int64)
        self._columns = torch.tensor([place.column for place in flat], dtype=torch.int64)
        self._own = torch.tensor(
            [number for number, each in enumerate(self._places) for _ in each], dtype=torch.int64
        )

    def first_mismatch(self) -> str | None:
        """Say which copies differ, and on which ranks, the same on all ranks; None: none do.

        To be called by all ranks, when the weights of the last update are gathered.
        """
        sums = [self._checksum(each.read()).cpu() for each in self.held]
        own = torch.cat(sums).tolist() if sums else []
        table = self._mesh.gather_numbers(_filled(own, self._length))
        found = table[self._ranks, self._columns]
        wrong = found != torch.tensor(own, dtype=torch.int64)[self._own]
        differing = self._own[wrong].unique().tolist()
        return self._mesh.agree(self._told(differing, table) if differing else None)

    def _told(self, differing: Sequence[int], table: Tensor) -> str:
        """Of the values that differ the first one, if possible of those where a minority does."""
        found = []
        for number in differing:
            sums = {place.rank: int(table[place]) for place in self._places[number]}
            found.append((number, *_minority(sums)))
        number, who, _ = next((each for each in found if each[2]), found[0])
        more = f", and {count_noun(len(found) - 1, 'more value')}" if len(found) > 1 else ""
        return f"{self.held[number].describe(self._stages)}{more}: {who}"


def _filled(numbers: Sequence[int], length: int) -> Tensor:
    """The numbers in a list of that length, int64."""
    filled = torch.full((length,), _NOTHING, dtype=torch.int64)
    filled[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return filled


def _minority(sums: dict[int, int]) -> tuple[str, bool]:
    """Say which ranks have another sum than most, or that no sum has most; and whether one has."""
    (usual, most), (_, second) = Counter(sums.values()).most_common(2)
    if most == second:
        ranks = ", ".join(map(str, sorted(sums)))
        return f"ranks {ranks} do not agree, and none is in a minority", False
    wrong = [str(rank) for rank, value in sorted(sums.items()) if value != usual]
    word, verb = ("rank", "differs") if len(wrong) == 1 else ("ranks", "differ")
    return f"{word} {', '.join(wrong)} {verb} from {count_noun(most, 'other')}", True
