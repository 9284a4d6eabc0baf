"""1F1B-RR: stages with several ranks each."""

from itertools import product

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build
from megapipe.schedule.lower import lower
from megapipe.schedule.memory import messages, weight_replicas
from megapipe.schedule.program import ActionKind
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import to_csv
from tests.unit.schedule.schedule_times import timeline

COUNTS = [
    [2, 1],
    [1, 2],
    [2, 1, 1],
    [3, 1],
    [1, 3],
    [2, 2],
    [2, 3],
    [1, 2, 1],
    [4, 2, 1],
    [1, 3, 2],
    [3],
]


def round_robin(replicas, microbatches):
    return build(
        "1f1b_rr", ranks=sum(replicas), microbatches=microbatches, ranks_per_stage=replicas
    )


def test_tables():
    assert to_csv(round_robin([2, 1], 4)).replace(",", " ").splitlines()[-3:] == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert to_csv(round_robin([1, 2], 4)).replace(",", " ").splitlines()[-3:] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1B0 1F2 1B2",
        "1F1 1B1 1F3 1B3",
    ]
    plain = build("1f1b", ranks=4, microbatches=6)
    assert round_robin([1] * 4, 6).ops == plain.ops
    assert round_robin([1] * 4, 6).direction is None


@pytest.mark.parametrize("replicas", COUNTS)
def test_a_micro_batch_takes_its_turn_forward_and_backward(replicas):
    """Micro-batch k on replica k mod c of each stage; its messages go between these."""
    schedule = round_robin(replicas, 12)
    home = {
        (stage, k): sum(replicas[:stage]) + k % count
        for (stage, count), k in product(enumerate(replicas), range(12))
    }
    for rank in range(sum(replicas)):
        assert all(home[op.stage, op.microbatch] == rank for op in schedule.rank_ops(rank))
    for program in lower(schedule):
        for action in program.actions:
            if action.do == ActionKind.SEND:
                ends = {home[stage, action.microbatch] for stage in range(len(replicas))}
                assert {program.rank, action.peer} <= ends


@pytest.mark.parametrize("replicas", COUNTS)
def test_ranks_with_equal_work_are_idle_as_in_1f1b_at_most(replicas):
    """On the first of two stages as many micro-batches are under way as PipeDream has: ranks /
    replicas, rounded up."""
    p = sum(replicas)
    for m in (12, 24, 36):
        schedule = round_robin(replicas, m)
        times = timeline(schedule, F=1, B=2)
        assert times.busy == tuple([3 * m] * p)
        assert times.makespan <= 3 * (m + p - 1)
        assert validate(schedule).peak_held == schedule.activation_bound
        if len(replicas) <= 2:
            assert schedule.activation_bound[0] == min(-(-p // replicas[0]), m // replicas[0])
        assert messages(schedule) == 2 * m * (len(replicas) - 1)
    assert weight_replicas(schedule) == tuple(count for count in replicas for _ in range(count))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"ranks": 4, "ranks_per_stage": [2, 1]},
            r"ranks_per_stage \[2, 1\] adds up to 3 ranks; it must add up to 4$",
        ),
        (
            {"ranks": 2, "ranks_per_stage": []},
            r"ranks_per_stage \[\] adds up to 0 ranks; it must add up to 2$",
        ),
        ({"ranks_per_stage": [3, 0]}, r"1f1b_rr: ranks_per_stage\[1\] must be at least 1, not 0"),
        (
            {"microbatches": 7, "ranks_per_stage": [2, 1]},
            r"must be a multiple of 2 for ranks_per_stage \[2, 1\], not 7; the next is 8$",
        ),
        (
            {"ranks": 5, "microbatches": 7, "ranks_per_stage": [2, 3]},
            r"must be a multiple of 6 for ranks_per_stage \[2, 3\], not 7; the next is 12$",
        ),
        (
            {"microbatches": 3},
            r"must be a multiple of 2 for ranks_per_stage \[2, 1\], not 3; the n",
        ),
        (
            {"name": "1f1b", "ranks_per_stage": [2, 1]},
            r"schedule 1f1b: ranks_per_stage must not be given, not \[2, 1\]; 1f1b_rr supports it",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(ScheduleError, match=message):
        build(**{"name": "1f1b_rr", "ranks": 3, "microbatches": 12, **given})
