"""Maps from stage to rank."""

from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.placement import Placement, loop, mirrored, replicated, vee, wave


def test_loop_vee_and_wave():
    assert loop(3, 2).table == ((0, 1, 2, 0, 1, 2),)
    assert vee(3).table == ((0, 1, 2, 2, 1, 0),)
    assert wave(3, 2).table == ((0, 1, 2, 2, 1, 0, 0, 1, 2, 2, 1, 0),)
    assert wave(3) == vee(3)
    assert loop(3, 2).stages_of(1) == (1, 4)
    assert vee(3).stages_of(0) == (0, 5)
    assert wave(3, 2).stages_of(2) == (2, 3, 8, 9)
    assert vee(3).stages == 6
    assert vee(3).rank_of(4) == 1


def test_replicas():
    both = mirrored(loop(2))
    assert both == Placement(2, ((0, 1), (1, 0)))
    assert [both.rank_of(0, direction) for direction in (0, 1)] == [0, 1]
    assert both.stages_of(0) == (0, 1)
    assert both.holders(0) == (0, 1)
    assert mirrored(vee(2)).table == ((0, 1, 1, 0), (1, 0, 0, 1))
    assert len(mirrored(both).table) == 4


def test_holders():
    assert loop(3).holders(1) == (1,)
    assert mirrored(loop(3)).holders(1) == (1,)
    assert mirrored(loop(3)).holders(0) == (0, 2)


def test_replicated_stages_take_turns():
    assert replicated([2, 1]).table == ((0, 2), (1, 2))
    assert replicated([1, 2]).table == ((0, 1), (0, 2))
    assert replicated([2, 3]).table == ((0, 2), (1, 3), (0, 4), (1, 2), (0, 3), (1, 4))
    assert replicated([1, 1, 1]) == loop(3)
    assert replicated([3]).holders(0) == (0, 1, 2)
    with pytest.raises(ScheduleError, match=r"replicas\[1\] must be at least 1, not 0"):
        replicated([2, 0])


def test_a_stage_is_a_share_of_a_full_rank():
    assert loop(4).stage_shares == (1,) * 4
    assert loop(4, 3).stage_shares == (Fraction(1, 3),) * 12
    assert vee(4).stage_shares == (Fraction(1, 2),) * 8
    assert mirrored(loop(4)).stage_shares == (1,) * 4
    assert replicated([2, 1]).stage_shares == (2, 1)
    assert Placement(2, ((0, 1, 0), (1, 0, 0))).stage_shares == tuple(
        Fraction(2 * holders, 5) for holders in (2, 2, 1)
    )


@pytest.mark.parametrize(
    ("ranks", "table", "message"),
    [
        (1, (), "it has no stage"),
        (1, ((),), "it has no stage"),
        (2, ((0, 2),), "stage 1 of direction 0 is on rank 2; ranks go from 0 to 1"),
        (2, ((0, 0),), "rank 1 has no stage"),
        (2, ((0, 1), (1,)), "direction 1 has 1 stages, direction 0 has 2"),
    ],
)
def test_bad_tables(ranks, table, message):
    with pytest.raises(ScheduleError, match=message):
        Placement(ranks, table)


@pytest.mark.parametrize(
    "make", [lambda: loop(0), lambda: loop(2, 0), lambda: vee(0), lambda: wave(2, 0)]
)
def test_sizes_below_one(make):
    with pytest.raises(ScheduleError, match="must be at least 1, not 0"):
        make()
