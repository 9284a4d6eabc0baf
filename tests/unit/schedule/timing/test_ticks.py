"""Times as whole numbers of ticks: exact at any size, and packed."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.timing.idle import idle
from megapipe.schedule.timing.simulate import simulate
from megapipe.schedule.timing.ticks import Wide, per_unit, room
from tests.unit.schedule.schedule_cases import of
from tests.unit.schedule.timing.longest_paths import Clocks

printed = st.floats(0, 1e6).map(lambda number: Fraction(repr(number)))
"""What floats look like in print: decimals of up to 17 digits, of any size."""


def test_a_tick_is_no_shorter_than_it_must_be():
    assert per_unit([3, Fraction(1, 6), Fraction(3, 4)]) == 12
    assert per_unit([3, 4]) == per_unit([]) == 1


@given(st.lists(st.integers(-(2**100), 2**100), min_size=1), st.integers(1, 4))
def test_wide_lists_are_lists(numbers, repeats):
    width = max(number.bit_length() for number in numbers) // 8 + 1
    wide = Wide(width, numbers) * repeats
    expected = numbers * repeats
    assert [*wide] == expected
    assert len(wide) == len(expected)
    middle = len(expected) // 2
    wide[middle] = expected[middle] = numbers[-1]
    assert [*wide] == expected
    assert wide[-1] == expected[-1]
    with pytest.raises(IndexError):
        wide[len(wide)]


@pytest.mark.parametrize(
    ("largest", "itemsize"), [(1.0, 8), (2**63 - 1, 8), (2**63, 9), (2**79, 11), (2**79 - 1, 10)]
)
def test_numbers_take_the_room_of_the_largest(largest, itemsize):
    values = room(0, 3, largest)
    values.append(largest)
    values[1] = -1
    assert [*values] == [0, -1, 0, largest]
    assert (values.width if isinstance(values, Wide) else values.itemsize) == itemsize


@settings(max_examples=100, deadline=None)
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


def test_times_beyond_64_bits_are_packed_and_exact():
    third = Fraction(1, 3**40)
    timeline = simulate(of("0F0 0F1 0B0 0B1", 2), Cost(F=1 + third, B=2))
    assert isinstance(timeline.start_ticks[0], Wide)
    assert [*timeline.starts[0]] == [0, 1 + third, 2 + 2 * third, 4 + 2 * third]
    assert timeline.ends[0][-1] == timeline.makespan == 6 + 2 * third
    assert timeline.starts[0][1:3] == [1 + third, 2 + 2 * third]
