"""Check for device faults: values that several ranks hold must be bitwise equal.

Several ranks hold equal values in four cases. All replicas and all holders of a stage or a tied
embedding all-gather the same weights. Every tensor-parallel rank has all of a norm's weights and of
some biases, with their states. Without ZeRO each replica has all states. Experts may have replicas.
No computation notices a flipped bit in one of these values. So the values are checked now and then:
each rank sends all other ranks a checksum of each shared value.

Two ranks hold the same value if its name is equal on both: the parameter, the kind of value, the
region and the range. So the check needs no knowledge of the layout.
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
from megapipe.text import count_noun

WEIGHTS = "weights"
_NOTHING = 0
"""Key that stands for no value and pads short lists."""


@dataclass(frozen=True)
class ReplicatedValue:
    """Values of one parameter on a rank: the range [start, stop) of the weights with which the rank
    computes (`kind` "weights"), of a master, or of a state."""

    shard: Shard
    entry: ParamRange
    kind: str
    start: int
    stop: int

    @property
    def key(self) -> int:
        """Hash of the values' name, equal on all ranks that hold them; never 0."""
        spec = self.entry.spec
        regions = [tuple(region) for _, region in spec.global_regions()]
        return _key(f"{self.kind} {spec.name} {regions} {self.start} {self.stop}")

    def read(self) -> Tensor:
        """Return the values, flat [n]: a view of stored memory."""
        a, b = self.entry.start + self.start, self.entry.start + self.stop
        shard = self.shard
        if self.kind != WEIGHTS:
            return shard.store.read(self.kind, a - shard.start, b - shard.start)
        if shard.bucket.sharded_weights:
            return shard.weights[shard.local(a, b)]
        return shard.bucket.weights[a:b]

    def describe(self, stages: int) -> str:
        """Describe the values in words; `stages` is the number of stages."""
        kind = "master weights" if self.kind == MASTER else self.kind
        index = self.shard.bucket.index
        where = "the tied embedding" if index == stages else f"stage {index}"
        return f"{kind} of {self.entry.spec.name} ({where})"


@dataclass(frozen=True)
class HeldReplica:
    """Weights of an expert that has replicas, on the owner or on a rank with a replica."""

    stage: int
    tensor: SharedTensor
    kind: ClassVar[str] = WEIGHTS

    @property
    def key(self) -> int:
        """Hash of the weights' name, equal on all ranks that hold them; never 0."""
        return _key(f"{WEIGHTS} {self.tensor.key}")

    def read(self) -> Tensor:
        """Return the values, flat [n]: a view of stored memory."""
        return self.tensor.values.view(-1)

    def describe(self, stages: int) -> str:
        """Describe the values in words; `stages` is unused."""
        return f"{WEIGHTS} of {self.tensor.words} (stage {self.stage})"


def _key(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") + 1


def replicated_values(optimizer: Optimizer) -> Iterator[ReplicatedValue]:
    """Yield all weights, masters and states that a rank holds, once weights are gathered."""
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
    """Yield a rank's expert replicas, and weights of its experts that have replicas on other ranks.
    Collective: it waits until replicas have the newest weights."""
    for stage, of_stage in optimizer.replicas.items():
        for replicas in of_stage:
            replicas.wait_broadcast()
            yield from (HeldReplica(stage, tensor) for tensor in replicas.replicated_weights())


class _TableIndex(NamedTuple):
    """Position of a value in the table of checksums."""

    rank: int
    column: int


class ReplicaCheck:
    """Compares values of `optimizer` that several ranks hold. Collective: all ranks make the object
    together, and make a new one when expert replicas may have changed."""

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
        table_indices: dict[int, list[_TableIndex]] = {}
        for rank, row in enumerate(names):
            shared = (key for key in row if holders[key] > 1)
            for column, key in enumerate(shared):
                table_indices.setdefault(key, []).append(_TableIndex(rank, column))
        self._length = max(
            (p.column + 1 for each in table_indices.values() for p in each), default=0
        )
        """Maximum number of shared values on a rank."""
        self.shared = [each for each in everything if each.key in table_indices]
        """Values of this rank that another rank holds too."""
        self._table_indices = [table_indices[each.key] for each in self.shared]
        flat = [index for each in self._table_indices for index in each]
        self._ranks = torch.tensor([index.rank for index in flat], dtype=torch.int64)
        self._columns = torch.tensor([index.column for index in flat], dtype=torch.int64)
        self._own = torch.tensor(
            [number for number, each in enumerate(self._table_indices) for _ in each],
            dtype=torch.int64,
        )

    def first_mismatch(self) -> str | None:
        """Describe a value that differs between ranks, and on which ranks; None if all are equal.

        All ranks return the same text. Collective; call it when the weights are gathered.
        """
        sums = [self._checksum(each.read()).cpu() for each in self.shared]
        own = torch.cat(sums).tolist() if sums else []
        table = self._mesh.gather_numbers(_filled(own, self._length))
        found = table[self._ranks, self._columns]
        wrong = found != torch.tensor(own, dtype=torch.int64)[self._own]
        differing = self._own[wrong].unique().tolist()
        return self._mesh.agree(self._describe(differing, table) if differing else None)

    def _describe(self, differing: Sequence[int], table: Tensor) -> str:
        """Describe the first mismatch, preferring one with a clear minority."""
        found = []
        for number in differing:
            sums = {index.rank: int(table[index]) for index in self._table_indices[number]}
            found.append((number, *_minority(sums)))
        number, who, _ = next((each for each in found if each[2]), found[0])
        more = f", and {count_noun(len(found) - 1, 'more value')}" if len(found) > 1 else ""
        return f"{self.shared[number].describe(self._stages)}{more}: {who}"


def _filled(numbers: Sequence[int], length: int) -> Tensor:
    """Return the numbers as int64 [`length`], padded with `_NOTHING`."""
    filled = torch.full((length,), _NOTHING, dtype=torch.int64)
    filled[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return filled


def _minority(sums: dict[int, int]) -> tuple[str, bool]:
    """Return a text on the ranks that differ from the majority, and whether there is a majority."""
    (usual, most), (_, second) = Counter(sums.values()).most_common(2)
    if most == second:
        ranks = ", ".join(map(str, sorted(sums)))
        return f"ranks {ranks} differ, and no rank is in a minority", False
    wrong = [str(rank) for rank, value in sorted(sums.items()) if value != usual]
    word, verb = ("rank", "differs") if len(wrong) == 1 else ("ranks", "differ")
    return f"{word} {', '.join(wrong)} {verb} from {count_noun(most, 'other')}", True
