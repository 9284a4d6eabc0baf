"""Collectives of ranks whose experts have very different numbers of rows: each group's members
begin the same ones, of as many bytes, in one order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from megapipe import TrainStep
from megapipe.testing import World, run_world
from tests.parity.cases import Case, Rows, configure
from tests.parity.collective_recorder import Call, recording
from tests.parity.forced_routing import chosen

UNEVEN = [[0, 1], [1, 5], [1, 2]]
"""Choices of tokens in turn, among 16 experts: rank 0 has most rows and none for its last expert,
rank 1 has few, and the other two none."""
FOLDED = Case(
    dp=2,
    tp=2,
    sequence_parallel=True,
    ep=4,
    moe="sixteen",
    layers=2,
    batch=1,
    zero=3,
)
PIPELINE = replace(
    FOLDED, tp=1, sequence_parallel=False, ep=2, pp=2, m=4, schedule="zb_v", layers=4
)
CASES = [
    FOLDED,
    replace(FOLDED, expert_chunks=3, activations="experts again"),
    replace(FOLDED, expert_chunks=3, dispatch="hierarchical", node=2, activations="full"),
    replace(FOLDED, expert_chunks=3, dispatch="all_gather", ep=2),
    replace(FOLDED, expert_chunks=3, dispatch="fetch", activations="experts again"),
    replace(FOLDED, expert_chunks=3, dispatch="hierarchical", node=2, ep=2, etp=2),
    PIPELINE,
    replace(PIPELINE, schedule="dualpipe", zero=1, expert_chunks=2),
]


def run_recorded(world: World) -> list[list[Call]]:
    """Return the collectives of a step of each case."""
    found = []
    for case in CASES:
        config, layout = configure(case)
        step = TrainStep(config, layout, world.mesh(case.grid))
        with chosen(UNEVEN), recording() as recorder:
            step.train(0, Rows(case))
        found.append(recorder.calls)
    return found


def between(calls: list[Call], one: int, other: int) -> list[Call]:
    """Return the calls of groups with both ranks."""
    return [call for call in calls if {one, other} <= set(call.ranks)]


@pytest.mark.full
def test_members_of_a_group_begin_the_same_collectives_in_one_order() -> None:
    """Ranks may have no rows, and there are several groups: two ranks that are in both begin their
    collectives in one order, as communicators of GPUs need it."""
    for case, ranks in zip(CASES, zip(*run_world(4, run_recorded), strict=True), strict=True):
        empty = [call for call in ranks[-1] if call.lengths and not any(call.lengths[0])]
        assert empty or case.dispatch == "fetch", "the last rank has rows"
        for one, other in itertools.combinations(range(4), 2):
            pairs = zip(
                between(ranks[one], one, other), between(ranks[other], one, other), strict=True
            )
            for mine, theirs in pairs:
                assert (mine.group, mine.name) == (theirs.group, theirs.name), case.name
                if not mine.lengths:
                    assert mine.bytes == theirs.bytes, case.name
                    continue
                (sends, receives), at = theirs.lengths, mine.ranks.index
                assert mine.lengths[1][at(other)] == sends[at(one)], case.name
                assert mine.lengths[0][at(other)] == receives[at(one)], case.name
