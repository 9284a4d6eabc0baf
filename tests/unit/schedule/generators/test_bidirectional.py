"""GEMS and BitPipe: two directions."""

from fractions import Fraction
from itertools import pairwise

import pytest

from megapipe.errors import ScheduleError
from megapipe.schedule.generators import build
from megapipe.schedule.memory import messages, peak_held, weight_replicas
from tests.unit.schedule.schedule_times import check_all_sizes, idle, lines, timeline

TIMES = [(1, 1), (1, 2), (2, 1), (2, 3)]


def even(p):
    return p % 2 == 0


def gems(p, m):
    return build("gems", ranks=p, microbatches=m)


def bitpipe(p, m, chunks=2):
    return build("bitpipe", ranks=p, microbatches=m, chunks=chunks)


def test_all_sizes_of_gems():
    check_all_sizes("gems", even)


@pytest.mark.parametrize("chunks", [2, 4])
def test_all_sizes_of_bitpipe(chunks):
    check_all_sizes("bitpipe", even, chunks=chunks)


def test_gems_table():
    assert lines(gems(2, 3)) == ["0F0 0B0 1F1 1B1 0F2 0B2", "1F0 1B0 0F1 0B1 1F2 1B2"]


@pytest.mark.parametrize(("F", "B"), TIMES)
@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 5), (4, 2), (4, 9), (8, 4)])
def test_gems_in_time(p, m, F, B):
    expected = m * (F + B) + (p - 1) * (F + B + (m - 1) * max(F, B))
    assert timeline(gems(p, m), F=F, B=B).makespan == expected


@pytest.mark.parametrize("p", [2, 4, 8])
def test_gems_comes_to_the_surveys_bubble(p):
    """At B = 2F each further micro-batch takes 2p+1 and computes 3: (p-1)/(p+1/2) is idle."""
    timelines = {m: timeline(gems(p, m), F=1, B=2) for m in (1, 2, 3, 4, 5, 400)}
    makespans = [timelines[m].makespan for m in range(1, 6)]
    assert [b - a for a, b in pairwise(makespans)] == [2 * p + 1] * 4
    limit = (p - 1) / (p + Fraction(1, 2))
    assert abs(timelines[400].bubble_makespan - limit) < Fraction(1, 400)


@pytest.mark.parametrize("p", [2, 4, 8])
def test_gems_memory(p):
    assert peak_held(gems(p, 7)) == (1,) * p
    assert weight_replicas(gems(p, 7)) == (2,) * p


def test_bitpipe_table():
    assert lines(bitpipe(2, 2)) == [
        "0F0 1F1 2F1 3F0 3B0 2B1 1B1 0B0",
        "0F1 1F0 2F0 3F1 3B1 2B0 1B0 0B1",
    ]


@pytest.mark.parametrize(("F", "B"), TIMES)
@pytest.mark.parametrize("chunks", [2, 4, 6])
@pytest.mark.parametrize(("p", "units"), [(2, 1), (4, 1), (4, 2), (4, 5), (6, 3), (8, 2)])
def test_bitpipe_in_time(p, units, chunks, F, B):
    expected = Fraction((p - 2) * max(F, B), chunks)
    assert idle(bitpipe(p, units * p, chunks), F=F, B=B) == expected


@pytest.mark.parametrize("p", [2, 4, 8])
def test_bitpipe_between_units(p):
    """Never worse than 1F1B, whatever m."""
    for m in range(1, 3 * p + 2):
        assert idle(bitpipe(p, m), F=1, B=2) <= 3 * (p - 1)
    assert [idle(bitpipe(4, m), F=1, B=2) for m in range(1, 10)] == [9, 6, 5, 2, 6, 4, 4, 2, 6]


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 8), (8, 16)])
@pytest.mark.parametrize(("F", "B"), TIMES)
def test_bitpipe_is_not_longer_than_its_parents(p, m, F, B):
    chimera = build("chimera", ranks=p, microbatches=m)
    interleaved = build("interleaved_1f1b", ranks=p, microbatches=m, chunks=2)
    parents = min(timeline(parent, F=F, B=B).makespan for parent in (chimera, interleaved))
    assert timeline(bitpipe(p, m), F=F, B=B).makespan <= parents


def test_bitpipe_against_its_parents_in_numbers():
    makespans = {
        name: timeline(build(name, ranks=4, microbatches=8, chunks=chunks)).makespan
        for name, chunks in (("bitpipe", 2), ("chimera", None), ("interleaved_1f1b", 2))
    }
    assert makespans == {"bitpipe": 26, "chimera": 30, "interleaved_1f1b": Fraction(57, 2)}


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 4])
def test_bitpipe_memory_and_messages(p, chunks):
    schedule = bitpipe(p, 2 * p, chunks)
    assert peak_held(schedule) == (p,) * p
    assert weight_replicas(schedule) == (2,) * p
    turns = chunks - 1
    assert messages(schedule) == 2 * 2 * p * (chunks * p - 1 - turns)


def test_refusals():
    with pytest.raises(ScheduleError, match="ranks must be a multiple of 2, not 3; the next is 4"):
        gems(3, 4)
    with pytest.raises(ScheduleError, match="ranks must be a multiple of 2, not 5; the next is 6"):
        bitpipe(5, 4)
    with pytest.raises(ScheduleError, match="chunks must be even, two per wave, not 5"):
        bitpipe(4, 4, chunks=5)
