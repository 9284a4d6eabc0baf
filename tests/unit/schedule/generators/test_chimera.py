"""Chimera: merged pipelines, direct concatenation, doubling and halving."""

from fractions import Fraction
from itertools import pairwise

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build
from megapipe.schedule.ir import Kind
from megapipe.schedule.memory import peak_held, weight_replicas
from tests.unit.schedule.schedule_times import check_all_sizes, idle, lines, timeline

NAMES = ["chimera", "chimera_forward_doubling", "chimera_backward_halving"]


def chimera(p, m, **options):
    return build("chimera", ranks=p, microbatches=m, **options)


def doubling(p, m, **options):
    return build("chimera_forward_doubling", ranks=p, microbatches=m, **options)


def halving(p, m, **options):
    return build("chimera_backward_halving", ranks=p, microbatches=m, **options)


@pytest.mark.parametrize("pairs", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_all_sizes(name, pairs):
    check_all_sizes(name, legal=lambda p: p % (2 * pairs) == 0, ranks=8, chimera_pairs=pairs)


def test_wrong_ranks():
    with pytest.raises(ScheduleError, match="multiple of 2, not 3; the next is 4"):
        chimera(3, 4)
    with pytest.raises(ScheduleError, match="multiple of 4, not 6; the next is 8"):
        chimera(6, 6, chimera_pairs=2)


def test_table():
    assert lines(chimera(4, 4)) == [
        "0F0 0F2 3F1 3B1 3F3 3B3 0B0 0B2",
        "1F0 2F1 1F2 2F3 2B1 1B0 2B3 1B2",
        "1F1 2F0 1F3 2F2 2B0 1B1 2B2 1B3",
        "0F1 0F3 3F0 3B0 3F2 3B2 0B1 0B3",
    ]


@pytest.mark.parametrize("m", range(4, 24, 2))
@pytest.mark.parametrize("p", [2, 4])
def test_bubble_where_backward_is_as_long_as_forward(p, m):
    """(p-2)/(2m+p-2), for every even m >= p."""
    schedule = chimera(p, m)
    assert timeline(schedule, F=1, B=1).bubble_makespan == Fraction(p - 2, 2 * m + p - 2)


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_one_unit_where_backward_is_twice_as_long(p):
    measured = timeline(chimera(p, p), F=1, B=2)
    assert measured.bubble_makespan == Fraction(p - 2) / (Fraction(3, 2) * p + p - 2)


@pytest.mark.parametrize(("p", "units"), [(4, 2), (4, 5), (8, 2), (8, 3), (16, 2)])
def test_gaps_between_units_where_backward_is_twice_as_long(p, units):
    assert idle(chimera(p, units * p), F=1, B=2) == (units + 1) * (p - 2)


def test_published_direct_concatenation():
    assert timeline(chimera(4, 8), F=1, B=2).bubble_makespan == Fraction(1, 5)


@pytest.mark.parametrize(
    ("m", "equal", "twice"), [(1, 6, 9), (2, 4, 6), (3, 4, 7), (5, 4, 9), (6, 2, 6), (7, 4, 9)]
)
def test_between_whole_units(m, equal, twice):
    """p = 4; an odd m runs as the next even one without its last micro-batch."""
    assert idle(chimera(4, m), F=1, B=1) == equal
    assert idle(chimera(4, m), F=1, B=2) == twice


@pytest.mark.parametrize(
    ("p", "pairs"), [(4, 2), (8, 2), (8, 4), (12, 2), (12, 3), (16, 2), (16, 4), (16, 8)]
)
def test_more_pairs(p, pairs):
    for units in (1, 2, 3):
        schedule = chimera(p, units * p, chimera_pairs=pairs)
        assert idle(schedule, F=1, B=1) == p // pairs - 2
        assert idle(schedule, F=1, B=2) == (units + 1) * (p // pairs - 2)
        assert weight_replicas(schedule) == (2 * pairs,) * p


@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
@pytest.mark.parametrize("units", [1, 2])
def test_peak(p, units):
    expected = tuple(p // 2 + 1 + min(r, p - 1 - r) for r in range(p))
    schedule = chimera(p, units * p)
    assert peak_held(schedule) == expected
    assert (min(expected), max(expected)) == (p // 2 + 1, p)
    assert max(peak_held(halving(p, units * p))) == p
    assert max(peak_held(doubling(p, 2 * units * p))) == 2 * p


def test_peak_between_whole_units():
    assert [max(peak_held(chimera(8, m))) for m in range(1, 20)] == [*range(1, 9)] + [8] * 11


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("p", [4, 8, 16])
@pytest.mark.parametrize("units", [1, 2, 3])
def test_doubling_and_halving_leave_no_gaps(p, units, pairs):
    gap = p // pairs - 2
    assert idle(doubling(p, 2 * units * p, chimera_pairs=pairs), F=1, B=2) == 2 * gap
    assert idle(halving(p, units * p, chimera_pairs=pairs), F=1, B=2) == gap


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (8, 32)])
def test_doubling_and_halving_ratios(p, m):
    doubled, halved = (timeline(make(p, m), F=1, B=2) for make in (doubling, halving))
    assert doubled.bubble_makespan == Fraction(p - 2) / (Fraction(3, 2) * m + p - 2)
    assert halved.bubble_makespan == Fraction(p - 2, 3 * m + p - 2)


def test_remainder_of_doubling_and_halving():
    """It joins the last unit, so the idle time is that of whole units."""
    assert idle(doubling(4, 12), F=1, B=2) == 4
    assert idle(halving(4, 6), F=1, B=2) == 2


def test_doubling_goes_forward_in_pairs():
    for m in (7, 8):
        for ops in map(doubling(4, m).rank_ops, range(4)):
            for first, second in pairwise(ops):
                pair = first.kind == Kind.F and first.microbatch % 2 == 0 and first.microbatch < 6
                pair |= first.kind == Kind.F and first.microbatch == 6 and m == 8
                assert first.joined == pair
                if pair:
                    assert second == first._replace(microbatch=first.microbatch + 1, joined=False)


def test_halves_are_halves_of_one_microbatch():
    schedule = halving(4, 3)
    assert schedule.sizes == (Fraction(1, 2),) * 6
    assert schedule.direction == (0, 0, 1, 1, 0, 0)
