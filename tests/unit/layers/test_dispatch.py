"""Dispatch in chunks of experts: who sends what to whom, and in which order."""

from __future__ import annotations

import random
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.layers.moe import transfer
from megapipe.layers.moe.chunks import ExpertChunk, dispatch_chunks
from megapipe.layers.moe.dispatch import Dispatch
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from megapipe.layers.moe.permutation import ExpertCounts, Permutation
from megapipe.layers.moe.transfer import AllToAll, Permute, Step, combine_steps, dispatch_steps


def sent(chunk: ExpertChunk, source: int, ranks: int) -> list[int]:
    return [chunk.rows_between(source, member) for member in range(ranks)]


def test_a_chunk_has_some_experts_of_each_rank() -> None:
    """Two ranks have three of six experts each; counts are by rank and expert."""
    counts = [[2, 0, 1, 3, 1, 0], [0, 1, 2, 0, 4, 1]]
    first, second = (dispatch_chunks(counts, index, 1, 2) for index in (0, 1))
    assert [c.experts for c in first] == [slice(0, 2), slice(2, 3)]
    assert [sent(c, 0, 2) for c in first] == [[2, 4], [1, 0]]
    assert [sent(c, 1, 2) for c in first] == [[1, 4], [2, 1]]
    assert [c.token_rows for c in first] == [slice(0, 6), slice(6, 7)]
    assert [c.token_rows for c in second] == [slice(0, 5), slice(5, 8)]
    assert [(c.expert_rows, c.ends) for c in first] == [(slice(0, 3), [2, 3]), (slice(3, 6), [3])]
    assert [(c.expert_rows, c.ends) for c in second] == [(slice(0, 8), [3, 8]), (slice(8, 9), [1])]


class Noted:
    """Something of three chunks that notes what is asked of it."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def start(self, number: int) -> None:
        self.notes.append(f"start {number}")

    def start_next_hop(self, number: int) -> None:
        self.notes.append(f"next hop {number}")

    def wait(self, number: int) -> int:
        self.notes.append(f"wait {number}")
        return number


ONE_HOP = "start 0, start 1, wait 0, compute, start 2, wait 1, compute, wait 2, compute"
TWO_HOPS = (
    "start 0, start 1, next hop 0, start 2, next hop 1, wait 0, compute, next hop 2, wait 1, "
    "compute, wait 2, compute"
)


@pytest.mark.parametrize(("hops", "order"), [(1, ONE_HOP), (2, TWO_HOPS)])
def test_a_chunk_is_on_its_way_before_the_one_before_it_is_computed(hops: int, order: str) -> None:
    plan = SimpleNamespace(chunks=range(3), dispatcher=SimpleNamespace(hops=hops))
    matrices, values = Noted(), Noted()
    of_rank: Any = SimpleNamespace(plan=plan)
    for turn, (chunk, of, here) in enumerate(Dispatch.pipelined_chunks(of_rank, matrices, values)):
        assert (chunk, of, here) == (turn, turn, [turn])
        matrices.notes.append("compute")
        values.notes.append("compute")
    assert ", ".join(matrices.notes) == ", ".join(values.notes) == order


def test_all_who_share_an_expert_get_its_rows() -> None:
    """Two of four ranks have each half of the experts."""
    counts = [[1, 2], [0, 3], [0, 0], [2, 0]]
    ranks = [dispatch_chunks(counts, index, 2, 1)[0] for index in range(4)]
    wanted = [[1, 1, 2, 2], [0, 0, 3, 3], [0] * 4, [2, 2, 0, 0]]
    assert [sent(chunk, i, 4) for i, chunk in enumerate(ranks)] == wanted
    assert [chunk.ends for chunk in ranks] == [[3], [3], [5], [5]]
    assert [chunk.token_rows.stop for chunk in ranks] == [3, 3, 0, 2]


def test_rows_of_a_chunk_are_neighbours() -> None:
    """Two ranks have experts 0 to 2 and 3 to 5; chunks are 0, 1, 3, 4 and 2, 5."""
    choice = torch.tensor([[2, 0], [5, ~2], [4, 1], [~1, 3]], dtype=torch.int16)
    rows = Permutation.of(choice, 6, 3, 2)
    assert rows.choice_of_row[:6].tolist() == [1, 5, 7, 4, 0, 2]
    assert rows.row_of_choice.tolist() == [[4, 0], [5, 6], [3, 1], [6, 2]]


def test_rows_of_other_ranks_are_put_into_the_order_of_experts_and_then_of_ranks() -> None:
    choices = [[[0], [0], [2], [3], [3], [3]], [[1], [2], [2]]]
    counts = [[2, 0, 1, 3], [0, 1, 2, 0]]
    told = ExpertCounts(counts, torch.tensor(counts))
    found = []
    for index, own in enumerate(choices):
        axis = Axis(2, index, (0, 1), None)
        choice = torch.tensor(own, dtype=torch.int16)
        found.append(AllToAllDispatcher(axis).dispatch(choice, told))
    first, second = found
    assert [order.tolist() for order in first.arrival] == [[0, 1, 2]]
    assert [order.tolist() for order in second.arrival] == [[0, 4, 5, 1, 2, 3]]
    assert (first.plan.ends, second.plan.ends) == ([2, 3], [3, 6])


def exchanged(sending: list[Tensor], hops: list[AllToAll]) -> list[Tensor]:
    """Return what each rank has after one all-to-all of all ranks."""
    parts = {
        (rank, hop.axis.ranks[i]): part
        for rank, hop in enumerate(hops)
        for i, part in enumerate(sending[rank].split(list(hop.sends)))
    }
    found = []
    for rank, hop in enumerate(hops):
        coming = [parts[source, rank] for source in hop.axis.ranks]
        assert [len(part) for part in coming] == list(hop.receives)
        found.append(torch.cat(coming))
    return found


def taken(rows: list[Tensor], steps: list[list[Step]]) -> list[Tensor]:
    """Return what each rank has after these steps."""
    for together in zip(*steps, strict=True):
        if isinstance(together[0], Permute):
            turns = zip(rows, together, strict=True)
            rows = [transfer._permuted(own, step.blocks) for own, step in turns]  # type: ignore[union-attr]
        else:
            rows = exchanged(rows, list(together))  # type: ignore[arg-type]
    return rows


@pytest.mark.parametrize(("nodes", "places"), [(2, 2), (3, 2), (2, 4)])
def test_two_hops_bring_rows_where_one_does_and_back(nodes: int, places: int) -> None:
    """Counts differ, and some are 0; a row is (from, to, number)."""
    rng, n = random.Random(nodes), nodes * places
    table = [[rng.choice((0, 1, 2, 5)) for _ in range(n)] for _ in range(n)]
    table[1] = [0] * n
    rows = [
        torch.tensor([(a, b, i) for b in range(n) for i in range(table[a][b])]).view(-1, 3)
        for a in range(n)
    ]
    wanted = [
        torch.tensor([(a, b, i) for a in range(n) for i in range(table[a][b])]).view(-1, 3)
        for b in range(n)
    ]
    hops, flat = [], []
    for node, place in product(range(nodes), range(places)):
        neighbours = tuple(node * places + i for i in range(places))
        others = tuple(i * places + place for i in range(nodes))
        hops.append((Axis(places, place, neighbours, None), Axis(nodes, node, others, None)))
        flat.append(Axis(n, node * places + place, tuple(range(n)), None))

    def moved(source: int, member: int) -> int:
        return table[source][member]

    alone: list[tuple[Axis, Axis] | None] = [None] * n
    for through in (alone, hops):
        ways = list(zip(flat, through, strict=True))
        there = taken(rows, [dispatch_steps(moved, *way) for way in ways])
        assert all(map(torch.equal, there, wanted))
        back = taken(there, [combine_steps(moved, *way) for way in ways])
        assert all(map(torch.equal, back, rows))
