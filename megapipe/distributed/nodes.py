"""Which ranks share a node's memory, and groups of ranks through which nodes reach each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ParallelMesh


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, numbered by their first ranks."""

    of_rank: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[int]) -> Nodes:
        """The nodes where ranks of one node have one name; by rank."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @classmethod
    def on(cls, mesh: ParallelMesh, name: int) -> Nodes:
        """The nodes of all ranks, of which each gives the name of its own."""
        return cls.from_names(mesh.gather_numbers(torch.tensor([name])).flatten().tolist())

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, own in enumerate(self.of_rank) if own == node]

    def local_index(self, rank: int) -> int:
        """Place of a rank among those of its node."""
        return self.of_rank[:rank].count(self.of_rank[rank])

    @property
    def lanes(self) -> int:
        """How many groups of one rank of each node there are: of the first, the second, ..."""
        return min(self.of_rank.count(node) for node in range(self.count))

    def cross_node_group(self, number: int) -> list[int]:
        """The ranks of such a group, ascending."""
        return sorted(self.ranks(node)[number] for node in range(self.count))

    def backup_source(self, node: int) -> int:
        """The node of which this one keeps copies; itself where it is the only one."""
        return (node - 1) % self.count


def cross_node_axis(mesh: ParallelMesh, nodes: Nodes) -> Axis:
    """This rank's group of one rank of each node; it is alone where it is in none, or there is one
    node. All ranks call it."""
    number = nodes.local_index(mesh.rank)
    if nodes.count == 1 or number >= nodes.lanes:
        return Axis.alone(mesh.rank)
    return mesh.host_group_of(nodes.cross_node_group(number))
