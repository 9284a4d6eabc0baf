"""Operations of a rank by what they do, whichever micro-batch they are of."""

from collections import Counter
from dataclasses import replace

import pytest

from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.op_types import OpType, op_types


@pytest.mark.parametrize(
    "schedule",
    [
        build("1f1b", ranks=3, microbatches=7),
        build("zb_v", ranks=2, microbatches=5),
        build("seq1f1b", ranks=2, microbatches=3, slices=2),
        build("chimera_backward_halving", ranks=4, microbatches=8),
        build("autopipe", ranks=4, microbatches=8),
        build("dualpipe", ranks=4, microbatches=8),
    ],
    ids=lambda schedule: schedule.name,
)
def test_they_are_those_of_the_operations_in_their_order(schedule: Schedule) -> None:
    for rank in range(schedule.placement.ranks):
        wanted = [
            (op.kind, op.stage, op.slice, schedule.size_of(op.microbatch))
            for op in schedule.rank_ops(rank)
        ]
        found = list(op_types(schedule, rank))
        assert [each[:4] for each in found] == wanted
        assert not any(each.rebuilds for each in found)
        assert len({map(id, found)}) <= len({*wanted}), "few objects for many operations"


def test_a_backward_rebuilds_what_no_recomputation_has() -> None:
    schedule = replace(build("1f1b", ranks=2, microbatches=4), recompute=frozenset([1]))
    for rank, rebuilds in ((0, False), (1, True)):
        assert Counter(op_types(schedule, rank))[OpType(Kind.B, rank, 0, 1, rebuilds)] == 4


def test_a_backward_after_a_recomputation_rebuilds_nothing() -> None:
    schedule = build("merak", ranks=4, microbatches=8)
    for rank in range(4):
        types = Counter(op_types(schedule, rank))
        ahead = {op.microbatch for op in schedule.rank_ops(rank) if op.kind == Kind.R}
        rebuilds = OpType(Kind.B, rank, 0, 1, rebuilds=True)
        alone = 8 - len(ahead) if rank in schedule.recompute else 0
        assert types[rebuilds] == alone
