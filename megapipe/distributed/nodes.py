"""Which ranks are on the same node, and groups with one rank of every node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ParallelMesh


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job, numbered in the order of their lowest ranks."""

    of_rank: tuple[int, ...]

    @classmethod
    def from_names(cls, names: Sequence[int]) -> Nodes:
        """Build the nodes from a numeric name per rank, equal for ranks on the same node."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @classmethod
    def on(cls, mesh: ParallelMesh, name: int) -> Nodes:
        """Build the nodes of a job. Each rank passes the `name` of its own node. Collective."""
        return cls.from_names(mesh.gather_numbers(torch.tensor([name])).flatten().tolist())

    @property
    def count(self) -> int:
        return max(self.of_rank) + 1

    def ranks(self, node: int) -> list[int]:
        return [rank for rank, own in enumerate(self.of_rank) if own == node]

    def local_index(self, rank: int) -> int:
        """Return the index of a rank among the ranks of its node."""
        return self.of_rank[:rank].count(self.of_rank[rank])

    @property
    def lanes(self) -> int:
        """Number of cross-node groups. Group i has the rank with local index i of every node."""
        return min(self.of_rank.count(node) for node in range(self.count))

    def cross_node_group(self, number: int) -> list[int]:
        """Return the ranks with local index `number`, one on each node, ascending."""
        return sorted(self.ranks(node)[number] for node in range(self.count))

    def backup_source(self, node: int) -> int:
        """Return the node whose state `node` backs up: the previous node; itself if it is alone."""
        return (node - 1) % self.count


def cross_node_axis(mesh: ParallelMesh, nodes: Nodes) -> Axis:
    """Return the axis of the ranks with this rank's local index, one on each node. The axis has
    only this rank if there is one node, or if a node has no rank with that index. Collective."""
    number = nodes.local_index(mesh.rank)
    if nodes.count == 1 or number >= nodes.lanes:
        return Axis.alone(mesh.rank)
    return mesh.host_group_of(nodes.cross_node_group(number))
