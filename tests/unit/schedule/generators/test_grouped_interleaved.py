"""Interleaved in groups of p/2 to p, with a split backward."""

from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build
from megapipe.schedule.memory import peak_held
from tests.parity.tiers import in_parts
from tests.unit.schedule.schedule_times import check_all_sizes, idle, lines

NAME = "grouped_interleaved"
TIMES = [(1, 1, 1), (20, 22, 12), (3, 7, 5), (5, 2, 9)]
RANKS = range(1, 17)


def grouped(p, m, **options):
    return build(NAME, ranks=p, microbatches=m, **options)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_all_sizes(chunks):
    check_all_sizes(NAME, legal=lambda p: True, chunks=chunks)


@pytest.mark.parametrize("group", range(1, 7))
def test_all_groups(group):
    check_all_sizes(
        NAME, legal=lambda p: p <= 2 * group and group <= p, microbatch_group_size=group
    )


def test_table():
    assert lines(grouped(2, 2)) == [
        "0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1",
        "1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1I0 1W0 1I1 1W1",
    ]


@in_parts("p", RANKS, default=4, full=2)
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_idle_time_of_whole_groups(p, chunks):
    """Measured for two chunks as (p-1)(F+I)/2, whatever the times are."""
    for groups in (1, 2, 3):
        schedule = grouped(p, groups * p, chunks=chunks)
        for F, I, W in TIMES:  # noqa: E741
            bubble = idle(schedule, F=F, I=I, W=W)
            assert bubble == Fraction(p - 1, chunks) * (F + I)


@pytest.mark.parametrize("p", RANKS)
def test_peaks(p):
    assert peak_held(grouped(p, 2 * p)) == tuple(p - Fraction(rank, 2) for rank in range(p))
    for group in range(-(-p // 2), p + 1):
        assert max(peak_held(grouped(p, 2 * p, microbatch_group_size=group))) == Fraction(
            group + p, 2
        )


@pytest.mark.parametrize("p", [2, 4, 8, 16])
def test_half_groups_are_slower_and_hold_three_quarters(p):
    whole, half = grouped(p, 4 * p), grouped(p, 4 * p, microbatch_group_size=p // 2)
    assert max(peak_held(half)) == Fraction(3 * p, 4)
    assert idle(half, F=1, I=1, W=1) == Fraction(5 * p - 4, 4)
    assert idle(whole, F=1, I=1, W=1) == p - 1


def test_the_order_is_that_of_interleaved_where_that_has_the_same_warm_up():
    """A group below p has one forward per rank less ahead there too."""
    one, other = (
        grouped(5, 12, microbatch_group_size=4),
        build("interleaved_1f1b", ranks=5, microbatches=12, microbatch_group_size=4),
    )
    for rank in range(5):
        split = [str(op).replace("I", "B") for op in one.rank_ops(rank) if op.kind != 3]
        assert split == [str(op) for op in other.rank_ops(rank)]


@pytest.mark.parametrize(("p", "group"), [(4, 1), (4, 5), (5, 2), (5, 6)])
def test_group_out_of_range(p, group):
    least = -(-p // 2)
    with pytest.raises(
        ScheduleError, match=f"microbatch_group_size must be from {least} to {p}, half of the ran"
    ):
        grouped(p, 4, microbatch_group_size=group)
