"""Which ranks share a node, and the groups of one rank of each node."""

from __future__ import annotations

import pytest

from megapipe.distributed.nodes import Nodes

CASES = {
    "AABB": [[0, 2], [1, 3]],
    "ABAB": [[0, 1], [2, 3]],
    "ABBA": [[0, 1], [2, 3]],
    "BBBAAC": [[0, 3, 5]],
    "AAA": [[0], [1], [2]],
}
"""Names of nodes by rank, and the lanes."""


@pytest.mark.parametrize("names", CASES)
def test_lanes_have_one_rank_of_each_node(names: str) -> None:
    nodes = Nodes.from_names([ord(name) for name in names])
    lanes = [nodes.cross_node_group(number) for number in range(nodes.lanes)]
    assert lanes == CASES[names]
    for lane in lanes:
        assert sorted(nodes.of_rank[rank] for rank in lane) == list(range(nodes.count))
    assert [nodes.local_index(rank) for rank in range(len(names))] == [
        names[:rank].count(name) for rank, name in enumerate(names)
    ]


def test_each_node_keeps_copies_of_another_one() -> None:
    nodes = Nodes((0, 0, 1, 2))
    assert [nodes.backup_source(node) for node in range(3)] == [2, 0, 1]
    assert Nodes((0, 0)).backup_source(0) == 0
