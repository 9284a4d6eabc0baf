"""Times as whole numbers of ticks: exact at any size, and packed."""

from array import array
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule import wavefront
from megapipe.schedule.cost import Cost
from megapipe.schedule.dependencies import Dependencies
from megapipe.schedule.generators import build
from megapipe.schedule.ir import JOINED
from megapipe.schedule.timing.idle import idle, typical_latency
from megapipe.schedule.timing.simulate import simulate
from megapipe.schedule.timing.ticks import (
    Wide,
    add,
    differences,
    kept,
    later,
    listed,
    per_unit,
    room,
    signs,
    total,
    unpacked,
    width,
)
from megapipe.schedule.wavefront import Wavefront
from tests.unit.schedule.schedule_cases import of
from tests.unit.schedule.timing.longest_paths import Clocks

printed = st.floats(0, 1e6).map(lambda number: Fraction(repr(number)))
"""What floats look like in print: decimals of up to 17 digits, of any size."""


def test_a_tick_is_no_shorter_than_it_must_be():
    assert per_unit([3, Fraction(1, 6), Fraction(3, 4)]) == 12
    assert per_unit([3, 4]) == per_unit([]) == 1


numbers = st.lists(st.integers(-(2**130), 2**130), min_size=1)
pairs = st.lists(st.tuples(*[st.integers(0, 2**130)] * 2), min_size=1)


@given(numbers)
def test_wide_lists_are_lists(expected):
    wide = Wide(width(max(map(abs, expected))), expected[:-1])
    wide.append(expected[-1])
    assert [*wide] == [wide[place] for place in range(len(wide))] == expected
    assert len(wide) == len(expected)
    assert wide[-1] == expected[-1]
    with mock.patch.object(Wide, "__iter__", side_effect=AssertionError("one by one")):
        assert total(wide) == sum(expected)
    with pytest.raises(IndexError):
        wide[len(wide)]


@given(pairs, st.integers(0, 130))
def test_rows_are_added_and_compared_without_a_carry(given, less):
    ours, others = ([each >> less for each in side] for side in zip(*given, strict=True))
    limbs = max(2, width(4 * max(*ours, *others, 1)))
    first, second = (add(*[Wide(limbs, side).rows] * 2) for side in (ours, others))
    assert unpacked(first) == [2 * each for each in ours]
    assert [*kept(first)] == [2 * each for each in ours]
    both = [*zip(ours, others, strict=True)]
    assert unpacked(later(first, second)) == [2 * max(pair) for pair in both]
    found = differences(first, second)
    assert found.tolist() == [2 * (a - b) for a, b in both]
    if all(abs(a - b) < 2**60 for a, b in both):
        assert (found.dtype == np.int64) == (limbs == 2)
    assert total(found) == 2 * sum(a - b for a, b in both)
    assert (signs(first) >= 0).all()
    assert (signs(Wide(limbs, [-1]).rows) < 0).all()


@pytest.mark.parametrize(
    ("largest", "limbs"), [(2**63 - 1, 1), (2**63, 2), (2**94 - 1, 2), (2**94, 3), (2**126, 4)]
)
def test_numbers_take_the_limbs_of_the_largest(largest, limbs):
    assert width(largest) == limbs
    assert isinstance(room(0, 3, largest), array) == (limbs == 1)


@pytest.mark.parametrize("numbers", [np.arange(3), np.array([0.5, 2.0])])
def test_numbers_of_64_bits_are_listed_in_little_memory(numbers):
    found = listed(numbers)
    assert isinstance(found, array)
    assert [*found] == numbers.tolist()


@pytest.mark.parametrize("largest", [1.0, 2**63 - 1, 2**79])
def test_lists_hold_what_they_have_room_for(largest):
    values = room(0, 3, largest)
    values.append(largest)
    values[1] = -1
    assert [*values] == [0, -1, 0, largest]


@settings(max_examples=100)
@given(*[printed] * 5, st.sampled_from(["zb_h1", "1f1b", "chimera", "seq1f1b", "dualpipe"]))
def test_decimals_of_17_digits_stay_exact(f, i, w, latency, overlap, name):
    schedule = build(name, ranks=4, microbatches=8)
    cost = Cost(F=f, I=i, W=w, latency=latency, overlap_factor=overlap, reduce=f, gather=w)
    timeline, clocks = simulate(schedule, cost), Clocks(schedule, cost)
    for rank, expected in enumerate(clocks.times):
        assert [*zip(timeline.starts[rank], timeline.ends[rank], strict=True)] == expected
    assert sorted(timeline.reductions) == sorted(clocks.reductions)
    for busy, causes in zip(timeline.busy, idle(timeline), strict=True):
        assert sum(causes) == timeline.makespan - busy


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "narrow", "recompute"),
    [
        ("zb_v", 32, 64, False, ()),
        ("1f1b", 33, 70, False, (0, 5)),
        ("zb_v", 32, 40, True, ()),
    ],
)
def test_many_ranks_abreast_are_as_exact(monkeypatch, name, ranks, microbatches, narrow, recompute):
    if narrow:  # the rounds end after some, and the loop goes on
        monkeypatch.setattr(wavefront, "WIDTH", ranks + 1)
    schedule = build(name, ranks=ranks, microbatches=microbatches)
    schedule = replace(schedule, recompute=frozenset(recompute))
    assert Wavefront.suits(Dependencies(schedule), schedule.ops)
    cost = Cost(F=Fraction("0.366"), I=1, W=Fraction("0.30000000000000004"), latency=Fraction(1, 7))
    timeline, clocks = simulate(schedule, cost), Clocks(schedule, cost)
    assert isinstance(timeline.start_ticks[0], Wide)
    for rank, expected in enumerate(clocks.times):
        assert [*zip(timeline.starts[rank], timeline.ends[rank], strict=True)] == expected
    for busy, causes in zip(timeline.busy, idle(timeline), strict=True):
        assert sum(causes) == timeline.makespan - busy


def test_operations_that_are_joined_and_too_many_slots_are_left_to_the_loop():
    schedule = build("1f1b", ranks=32, microbatches=2)
    dependencies, ops = Dependencies(schedule), [array("q", [0])] * 32
    assert Wavefront.suits(dependencies, ops)
    assert not Wavefront.suits(dependencies, [*ops[1:], array("q", [JOINED])])
    dependencies.slots = 1 << 31
    assert Wavefront.suits(dependencies, ops), "the last one is numbered 2^31 - 1"
    dependencies.slots += 1
    assert not Wavefront.suits(dependencies, ops)


def test_rounds_leave_nothing_or_what_deadlocks():
    for text, left in (("0F0 0B0/1F0 1B0", False), ("0B0 0F0/1F0 1B0", True)):
        schedule = of(text)
        dependencies = Dependencies(schedule)
        front = Wavefront(dependencies, schedule.ops)
        made = np.full(dependencies.slots, -1)
        made[dependencies.always_ready] = 0
        assert front.left
        for _, places, _ in front.rounds(made):
            made[front.make[places]] = 0
        assert front.left == left


@pytest.mark.parametrize("times", [[0.5, -1.0, 0.0], [1, -1, 0]])
def test_signs_are_those_of_numbers_of_64_bits_too(times):
    numbers = np.array(times)
    found = signs(numbers)
    assert (found < 0).tolist() == [False, True, False]
    numbers[1] = 2
    assert (found >= 0).all(), "what is filled later is seen"


def test_the_typical_latency_is_exact():
    latency = Fraction("0.30000000000000004")
    cost = Cost(F=Fraction(1, 7), B=2, latency=latency)
    timeline = simulate(build("1f1b", ranks=4, microbatches=8), cost)
    assert isinstance(timeline.start_ticks[0], Wide)
    assert typical_latency(timeline) == latency


def test_an_order_for_decimals_of_17_digits_is_that_for_the_same_fractions():
    """Costs are in whole ticks of 64 bits, and 2^80 times these, which need limbs."""
    cost = Cost(F=366, I=1234, W=500, latency=50)
    many = Cost(F=366 << 80, I=1234 << 80, W=500 << 80, latency=50 << 80)
    orders = [build("zb_v", ranks=4, microbatches=12, cost=each).ops for each in (cost, many)]
    assert orders[0] == orders[1]


def test_times_beyond_64_bits_are_packed_and_exact():
    third = Fraction(1, 3**40)
    timeline = simulate(of("0F0 0F1 0B0 0B1", 2), Cost(F=1 + third, B=2))
    assert isinstance(timeline.start_ticks[0], Wide)
    assert [*timeline.starts[0]] == [0, 1 + third, 2 + 2 * third, 4 + 2 * third]
    assert timeline.ends[0][-1] == timeline.makespan == 6 + 2 * third
    assert timeline.starts[0][1:3] == [1 + third, 2 + 2 * third]
