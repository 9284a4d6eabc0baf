"""AutoPipe: how many micro-batches are halved, and what that gains."""

from fractions import Fraction
from itertools import product

import pytest

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.generators.autopipe import rank_ops
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import loop
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import to_csv
from megapipe.schedule.timing.simulate import simulate

HALF = Fraction(1, 2)
SIZES = list(product(range(1, 9), range(1, 13)))  # ranks, micro-batches
TIMES = [(1, 2), (1, 1), (2, 3), (1, 3), (3, 2)]


def with_halves(ranks, microbatches, halved):
    """Build the schedule with any number of micro-batches in halves."""
    return Schedule(
        "halves",
        loop(ranks),
        microbatches + halved,
        tuple(rank_ops(rank, ranks, microbatches, halved) for rank in range(ranks)),
        sizes=(HALF,) * (2 * halved) + (Fraction(1),) * (microbatches - halved),
    )


def halved_of(schedule):
    return schedule.sizes.count(HALF) // 2


def never_waits(timeline):
    """Whether the last stage, once it has begun, computes without a pause."""
    return timeline.ends[-1][-1] - timeline.starts[-1][0] == timeline.busy[-1]


def test_table():
    assert to_csv(build("autopipe", ranks=3, microbatches=4)).replace(",", " ").splitlines() == [
        "# sizes 1/2 1/2 1 1 1",
        "0F0 0F1 0F2 0F3 0B0 0B1 0F4 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1B1 1F3 1B2 1F4 1B3 1B4",
        "2F0 2F1 2B0 2B1 2F2 2B2 2F3 2B3 2F4 2B4",
    ]


@pytest.mark.parametrize(("F", "B"), TIMES)
def test_the_last_stage_starts_in_half_the_time_and_never_waits(F, B):
    cost = Cost(F=F, B=B)
    for ranks, microbatches in SIZES:
        schedule = build("autopipe", ranks=ranks, microbatches=microbatches, cost=cost)
        timeline = simulate(schedule, cost)
        plain = simulate(build("1f1b", ranks=ranks, microbatches=microbatches), cost)
        assert plain.starts[-1][0] == (ranks - 1) * F
        assert timeline.starts[-1][0] == Fraction((ranks - 1) * F, 2)
        if halved_of(schedule) < microbatches:
            assert never_waits(timeline)
            assert timeline.makespan == plain.makespan - Fraction((ranks - 1) * F, 2)


@pytest.mark.parametrize(("F", "B"), TIMES)
def test_no_fewer_would_do(F, B):
    cost = Cost(F=F, B=B)
    for ranks, microbatches in SIZES:
        schedule = build("autopipe", ranks=ranks, microbatches=microbatches, cost=cost)
        halved = halved_of(schedule)
        assert halved == min(-((1 - ranks) * F // (2 * B)), microbatches)
        assert schedule.ops == with_halves(ranks, microbatches, halved).ops
        if 1 < halved < microbatches:
            assert not never_waits(simulate(with_halves(ranks, microbatches, halved - 1), cost))


def test_peak_is_that_of_1f1b():
    for ranks, microbatches in SIZES:
        schedule = build("autopipe", ranks=ranks, microbatches=microbatches)
        report = validate(schedule)
        assert report.bitwise_order
        assert report.peak_held == schedule.activation_bound
        assert schedule.whole_microbatches == microbatches
        for rank, ops in enumerate(schedule.ops):
            held = peak = Fraction(0)
            for op in schedule.rank_ops(rank):
                size = schedule.size_of(op.microbatch)
                held += size if op.kind.name == "F" else -size
                peak = max(peak, held)
            assert peak == min(ranks - rank, microbatches)
            assert len(ops) == 2 * schedule.microbatches


def test_one_rank_has_nothing_to_gain():
    schedule = build("autopipe", ranks=1, microbatches=3)
    assert halved_of(schedule) == 0
    assert schedule.ops == build("1f1b", ranks=1, microbatches=3).ops


def test_costs_by_stage():
    """The forwards before the last stage are 6 long, and its backward 1: 6/2 are due at once."""
    cost = Cost(F=(1, 2, 3, 9), B=(9, 9, 9, 1))
    assert halved_of(build("autopipe", ranks=4, microbatches=8, cost=cost)) == 3
    free = Cost(F=1, B=0)
    assert halved_of(build("autopipe", ranks=4, microbatches=8, cost=free)) == 8
