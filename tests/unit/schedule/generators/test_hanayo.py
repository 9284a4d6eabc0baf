"""Hanayo: waves."""

from fractions import Fraction

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build
from megapipe.schedule.memory import messages, peak_held, weight_replicas
from tests.unit.schedule.schedule_times import check_all_sizes, idle, lines, timeline

TIMES = [(1, 1), (1, 2), (2, 1), (2, 3)]


def hanayo(p, m, chunks=2):
    return build("hanayo", ranks=p, microbatches=m, chunks=chunks)


@pytest.mark.parametrize("chunks", [2, 4, 6])
def test_all_sizes(chunks):
    check_all_sizes("hanayo", legal=lambda p: True, chunks=chunks)


def test_table():
    assert lines(hanayo(2, 2)) == [
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
    ]


def test_odd_chunks():
    with pytest.raises(ScheduleError, match="chunks must be even, two per wave, not 3; the next i"):
        hanayo(4, 4, chunks=3)


@pytest.mark.parametrize(("F", "B"), TIMES)
@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 3), (4, 4), (4, 7), (5, 13), (8, 8), (8, 20)])
def test_idle_time(p, m, waves, F, B):
    """p - n slots of the last unit stay open, but for those that the first wave can close."""
    last = (m - 1) % p + 1
    expected = (Fraction(last - 1, waves) + p - last) * max(F, B)
    assert idle(hanayo(p, m, 2 * waves), F=F, B=B) == expected


@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 6), (8, 16)])
@pytest.mark.parametrize(("F", "B"), TIMES)
def test_bubble_falls_with_waves(p, m, F, B):
    bubbles = [
        timeline(hanayo(p, m, 2 * waves), F=F, B=B).bubble_makespan for waves in (1, 2, 3, 4)
    ]
    assert bubbles == sorted(set(bubbles), reverse=True)


@pytest.mark.parametrize("waves", [1, 2, 4])
@pytest.mark.parametrize("p", [4, 8])
def test_the_quoted_ratio_does_not_hold(p, waves):
    bubble = timeline(hanayo(p, p, 2 * waves), F=1, B=2).bubble_makespan
    assert bubble == Fraction(2 * p - 2, 3 * p * waves + 2 * p - 2)
    assert bubble < Fraction(2 * p - 2, 3 * p * waves + p - 1)


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("p", [2, 4, 5, 8])
def test_memory_and_messages(p, waves):
    few, enough = (hanayo(p, m, 2 * waves) for m in (p, 2 * p))
    assert peak_held(few)[-1] == p
    assert peak_held(enough) == (p,) * p
    assert weight_replicas(enough) == (1,) * p
    turns = 2 * waves - 1
    assert messages(enough) == 2 * 2 * p * (2 * waves * p - 1 - turns)


def test_equal_to_interleaved_where_both_times_are_equal():
    for p, m, chunks in ((4, 8, 2), (8, 16, 4)):
        other = build("interleaved_1f1b", ranks=p, microbatches=m, chunks=chunks)
        assert idle(hanayo(p, m, chunks), F=1, B=1) == idle(other, F=1, B=1)
