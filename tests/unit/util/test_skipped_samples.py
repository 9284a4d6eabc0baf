"""Samples that a run leaves out: which ones it takes instead."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.util.skipped_samples import SkippedSamples

RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda r: (r[0], r[0] + r[1])), max_size=5
)


def taken(ranges: list[tuple[int, int]], count: int) -> list[int]:
    """Return the first numbers that are in no range."""
    left = (n for n in itertools.count() if not any(a <= n < b for a, b in ranges))
    return list(itertools.islice(left, count))


@given(RANGES, st.integers(0, 60), st.integers(0, 20))
def test_the_numbers_that_are_left(ranges: list[tuple[int, int]], start: int, count: int) -> None:
    skipped_samples = SkippedSamples.of(ranges)
    expected = taken(ranges, start + count + 1)
    assert skipped_samples.number_after(start) == expected[start]
    assert list(skipped_samples.numbers(start, count)) == expected[start : start + count]
    assert all(b < c for (_, b), (c, _) in itertools.pairwise(skipped_samples.ranges))


@given(RANGES, st.integers(0, 60))
def test_what_is_left_out_from_a_number_on(ranges: list[tuple[int, int]], number: int) -> None:
    late = SkippedSamples.of(ranges).since(number)
    gone = {n for a, b in late.ranges for n in range(a, b)}
    assert gone == {n for a, b in ranges for n in range(a, b) if n >= number}


@given(RANGES, st.integers(0, 60))
def test_parts_of_what_is_taken(ranges: list[tuple[int, int]], count: int) -> None:
    """Three parts take turns."""

    def before(number: int) -> list[int]:
        return [len(range(part, number, 3)) for part in range(3)]

    numbers = taken(ranges, count)
    expected = [sum(n % 3 == part for n in numbers) for part in range(3)]
    assert SkippedSamples.of(ranges).counts(before, count) == expected


def test_what_a_checkpoint_has_of_it() -> None:
    found = SkippedSamples.stored([[8, 12], [2, 4], [4, 6]])
    assert found == SkippedSamples(((2, 6), (8, 12)))
    assert str(found) == "[[2,6],[8,12]]"
    for wrong in (3, {"a": 1}, [[1]], [[4, 4]], [[-1, 2]], [["a", "b"]], [[True, 2]]):
        with pytest.raises(ValueError, match="expected pairs"):
            SkippedSamples.stored(wrong)
