"""The source of each sample of a run."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data import mixture as module
from megapipe.data.mixture import Mixture, MixtureRecipe, weight_plan
from megapipe.errors import DataError

NAMES = ["a", "b", "c", "d", "e"]
WEIGHTS = st.lists(st.floats(0, 100) | st.just(1.0), min_size=2, max_size=5).filter(any)


def dealt(mixture: Mixture, samples: int) -> list[list[int]]:
    """Return the draws of each source, in their order."""
    found: list[list[int]] = [[] for _ in mixture.names]
    for sample in range(samples):
        source, number = mixture(sample)
        found[source].append(number)
    return found


def of(weights: list[float], most: list[int | None] | None = None) -> Mixture:
    recipe = MixtureRecipe([(0, weights)], most or [None] * len(weights))
    return Mixture(recipe, NAMES[: len(weights)])


@settings(max_examples=50)
@given(WEIGHTS, st.integers(1, 700))
def test_every_prefix_is_close_to_the_mixture(weights: list[float], samples: int) -> None:
    mixture, total = of(weights), sum(weights)
    found = dealt(mixture, samples)
    assert [len(numbers) for numbers in found] == mixture.taken(samples)
    for weight, numbers in zip(weights, found, strict=True):
        assert numbers == list(range(len(numbers))), "each draw once, in order"
        expected = samples * weight / total
        assert abs(len(numbers) - expected) <= len(weights) / 2 + 1 + samples / module.PERIOD
        assert weight or not numbers


@settings(max_examples=30)
@given(WEIGHTS)
def test_shares_of_a_period_are_whole_and_near(weights: list[float]) -> None:
    counts = of(weights).taken(module.PERIOD)
    assert sum(counts) == module.PERIOD
    for weight, count in zip(weights, counts, strict=True):
        exact = module.PERIOD * weight / sum(weights)
        assert math.floor(exact) - 5 <= count <= math.ceil(exact) + 1
        assert (count > 0) == (weight > 0)
    assert of(weights).taken(3 * module.PERIOD + 5)[0] >= 3 * counts[0]


def test_periods_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD", 10)
    mixture = of([3.0, 1.0, 1.0])
    found = dealt(mixture, 47)
    assert [len(numbers) for numbers in found] == mixture.taken(47)
    assert mixture.taken(40) == [24, 8, 8]
    assert all(numbers == list(range(len(numbers))) for numbers in found)
    order = [mixture(sample).source for sample in range(10)]
    assert [mixture(10 + sample).source for sample in range(10)] == order


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.none() | st.integers(1, 60)), min_size=2, max_size=4)
)
def test_what_is_used_up_is_left_out(sources: list[tuple[float, int | None]]) -> None:
    """The others go on in proportion, until nothing is left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PERIOD", 32)
        mixture = of([weight for weight, _ in sources], [most for _, most in sources])
        limits = [most for _, most in sources]
        known = [most for most in limits if most is not None]
        enough = sum(known) if len(known) == len(limits) else 300
        found = dealt(mixture, enough)
        for numbers, most in zip(found, limits, strict=True):
            assert numbers == list(range(len(numbers)))
            assert most is None or len(numbers) <= most
        for samples in (0, 1, enough // 2, enough):
            mixture.check(samples)
            assert sum(mixture.taken(samples)) == samples
        if len(known) == len(limits):
            assert [len(numbers) for numbers in found] == known
            assert mixture.taken(enough + 9) == known
            with pytest.raises(DataError, match=rf"are used up after {enough} samples"):
                mixture(enough)
            with pytest.raises(DataError, match=r"data.mixture: tokens and epochs of a, b"):
                mixture.check(enough + 1)


def test_weights_change_at_their_sample() -> None:
    plan = [(0, [1.0, 0.0]), (10, [0.0, 1.0]), (25, [1.0, 1.0])]
    mixture = Mixture(MixtureRecipe(plan, [None, 20]), ["a", "b"])
    sources = [mixture(sample).source for sample in range(45)]
    assert sources[:10] == [0] * 10
    assert sources[10:25] == [1] * 15
    assert sorted(sources[25:35]) == [0] * 5 + [1] * 5, "b has 5 left"
    assert sources[35:] == [0] * 10
    assert mixture.taken(45) == [25, 20]


def test_a_source_may_be_empty_until_weights_change() -> None:
    mixture = Mixture(MixtureRecipe([(0, [1.0, 0.0]), (10, [1.0, 1.0])], [4, None]), ["a", "b"])
    assert [mixture(sample).source for sample in range(4)] == [0] * 4
    with pytest.raises(DataError, match="are used up after 4 samples"):
        mixture(4)
    with pytest.raises(DataError, match="are used up after 4 samples"):
        mixture.check(20)
    assert mixture(10) == (1, 0)


def test_plans_of_weights_are_joined() -> None:
    assert weight_plan([2.0, 1]) == [(0, [2.0, 1])]
    plans = [[[0.0, 3.0], [8.0, 1.0]], 2.0, [[0.0, 1.0], [4.0, 0.0], [8.0, 5.0]]]
    assert weight_plan(plans) == [
        (0, [3.0, 2.0, 1.0]),
        (4, [3.0, 2.0, 0.0]),
        (8, [1.0, 2.0, 5.0]),
    ]
