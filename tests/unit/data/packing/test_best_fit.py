"""Pieces into samples with the least room that takes them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.packing.best_fit import best_fit


def rooms_left(lengths: list[int], room: int) -> list[int]:
    """Fit pieces one at a time: the longest first, into the fullest sample that takes it."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [r for r in left if r >= length]
        if fits:
            left[left.index(min(fits))] -= length
        else:
            left.append(room - length)
    return sorted(left)


@settings(max_examples=150)
@given(st.integers(1, 40), st.data())
def test_leaves_the_room_that_one_at_a_time_leaves(room: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, room), min_size=1, max_size=60))
    samples = best_fit(np.array(lengths), room)
    used = np.bincount(samples, lengths)
    assert sorted((room - used).tolist()) == rooms_left(lengths, room)
    assert (used > 0).all(), "no number is left out"


def test_little_is_left_of_many_documents() -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(4, 1.2, 20_000).astype(int) + 1, 512)
    samples = best_fit(lengths, 512)
    assert lengths.sum() / (512 * (samples.max() + 1)) > 0.998


@pytest.mark.parametrize("length", [1, 7])
def test_equal_pieces(length: int) -> None:
    samples = best_fit(np.full(10, length), 7)
    assert samples.tolist() == [i // (7 // length) for i in range(10)]
