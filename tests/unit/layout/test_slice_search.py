"""Cutting sequences: equal times against counting, the fastest cut against trying all."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import cache, partial
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.layout.slice_cost import SliceCost
from megapipe.layout.slice_search import balanced_slices, fastest_slices
from megapipe.model.gpt.flops import causal_flops, layer_flops
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.timing.simulate import simulate
from tests.parity.tiers import in_parts

NONE, ONE = Fraction(0), Fraction(1)


def model_of(hidden: int, heads: int = 1) -> ModelConfig:
    return ModelConfig(hidden=hidden, heads=heads).resolved(vocab_size=101, sequence_length=16)


def time_of(model: ModelConfig, overhead: Fraction = NONE, attention: Fraction = ONE) -> SliceCost:
    return SliceCost(cache(partial(causal_flops, model)), overhead, attention)


def all_cuts(points: int, count: int | None) -> Iterator[tuple[int, ...]]:
    for number in range(1, points + 1) if count is None else [count]:
        for inner in combinations(range(1, points), number - 1):
            yield tuple(b - a for a, b in pairwise((0, *inner, points)))


def test_flops_of_the_tokens_of_a_slice_written_out() -> None:
    """A layer on tokens 5, 6 and 7 that attend to all before them, each counted by torch."""
    model = ModelConfig.model_validate(
        {"hidden": 48, "heads": 8, "kv_heads": 2, "head_dim": 10, "activation": "swiglu"}
    ).resolved(vocab_size=101, sequence_length=16)
    h, f, d = 48, model.ffn_hidden or 0, 10
    with FlopCounterMode(display=False) as counter:
        for token in (5, 6, 7):
            x, q = torch.zeros(1, h), torch.zeros(8, 1, d)
            linear(x, torch.zeros((8 + 2 * 2) * d, h))
            scores = q @ torch.zeros(8, d, token + 1)
            scores @ torch.zeros(8, token + 1, d)
            linear(torch.zeros(1, 8 * d), torch.zeros(h, 8 * d))
            for shape in ((f, h), (f, h), (h, f)):
                linear(torch.zeros(1, shape[1]), torch.zeros(shape))
    assert causal_flops(model, 8) - causal_flops(model, 5) == counter.get_total_flops()


def test_shares() -> None:
    model = model_of(16)
    shares = time_of(model).shares((3, 4, 1))
    assert sum(shares) == 1
    token = [layer_flops(model, position + 1) for position in range(8)]
    assert shares == tuple(
        Fraction(sum(token[a:b]), sum(token)) for a, b in ((0, 3), (3, 7), (7, 8))
    )


def test_times_of_slices_written_out() -> None:
    """A token takes 6144 + 64 alone, and 64 for each that it sees besides; in quarters."""
    time = time_of(model_of(16), Fraction(5, 2), Fraction(7, 4))
    slices = {(3, 0): (3, 0 + 1 + 2), (3, 4): (3, 4 + 5 + 6), (1, 7): (1, 7), (8, 0): (8, 28)}
    for (length, before), (alone, seen) in slices.items():
        taken = (Fraction(5, 2) + alone) * 6208 + Fraction(7, 4) * seen * 64
        assert time(length, before) == 4 * taken
    assert time.first(8) == time(8, 0) - 4 * Fraction(5, 2) * 6208
    assert time.shares((3, 4, 1)) == tuple(
        Fraction(time(n, before), time(8, 0)) for n, before in ((3, 0), (4, 3), (1, 7))
    )
    assert sum(time.shares((3, 4, 1))) > 1


@given(st.integers(1, 8), st.integers(1, 400), st.integers(1, 12), st.data())
def test_balanced_to_within_a_token(
    width: int, length: int, count: int, data: st.DataObject
) -> None:
    """Attention from nearly all of the FLOPs (width 1) to little of them."""
    count = min(count, length)
    model = model_of(width * width)
    lengths = balanced_slices(time_of(model).first, length, count)
    assert sum(lengths) == length
    assert len(lengths) == count
    assert min(lengths) >= 1
    token = Fraction(layer_flops(model, length), causal_flops(model, length))
    if min(lengths) > 1:
        assert all(
            abs(share - Fraction(1, count)) <= token for share in time_of(model).shares(lengths)
        )


def test_balanced_slices_get_shorter() -> None:
    """2 x 16 x 12 x 16 FLOPs for the weights of a token, 4 x 16 for each position it sees."""
    model = model_of(16)
    assert (layer_flops(model, 0), layer_flops(model, 1)) == (6144, 6144 + 64)
    assert balanced_slices(time_of(model).first, 1024, 4) == (470, 229, 176, 149)
    assert balanced_slices(time_of(model).first, 1024, 4, multiple=32) == (480, 224, 160, 160)
    assert balanced_slices(time_of(model).first, 1024, 1) == (1024,)
    assert balanced_slices(time_of(model).first, 8, 8) == (1,) * 8
    assert balanced_slices(time_of(model).first, 256, 3, multiple=64) == (128, 64, 64)


@pytest.mark.parametrize("multiple", [1, 2, 8, 16])
def test_cuts_are_the_nearest_multiples(multiple: int) -> None:
    model, length, count = model_of(16), 256, 3
    lengths = balanced_slices(time_of(model).first, length, count, multiple)
    assert all(n % multiple == 0 for n in lengths)
    for index in (1, 2):
        share = Fraction(index * causal_flops(model, length), count)
        distance = {
            cut: abs(causal_flops(model, cut) - share) for cut in range(0, length + 1, multiple)
        }
        assert distance[sum(lengths[:index])] == min(distance.values())


def test_balanced_slices_give_the_bubble_that_uniform_ones_do_not() -> None:
    """p = 4, m = 8, k = 4, F = 1, B = 2: idle for (p-1)(F+B)/k where slices take equal times."""
    model = model_of(4)
    schedule = build("seq1f1b", ranks=4, microbatches=8, slices=4)
    idle = []
    for lengths in (balanced_slices(time_of(model).first, 4096, 4), (1024,) * 4):
        cost = Cost(F=1, B=2, slices=time_of(model).shares(lengths))
        idle.append(simulate(schedule, cost).makespan - 24)
    ideal = Fraction(9, 4)
    assert abs(idle[0] - ideal) < Fraction(1, 100)
    assert idle[1] > 2 * ideal


@settings(max_examples=60)
@given(
    st.integers(1, 7),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(1, 7),
    st.integers(0, 2**20),
)
def test_fastest_is_that_of_trying_all(
    points: int, ranks: int, microbatches: int, multiple: int, count: int | None, seed: int
) -> None:
    count = None if count is None else min(count, points)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(1, 30, (points + 1, points + 1), generator=generator)

    def time(length: int, context: int) -> int:
        assert length % multiple == context % multiple == 0
        return int(table[length // multiple, context // multiple])

    def pipeline(lengths: tuple[int, ...]) -> int:
        context, times = 0, []
        for n in lengths:
            times.append(time(n * multiple, context * multiple))
            context += n
        return microbatches * sum(times) + (ranks - 1) * max(times)

    lengths = fastest_slices(
        time,
        points * multiple,
        ranks,
        count=count,
        microbatches=microbatches,
        multiple=multiple,
    )
    assert count is None or len(lengths) == count
    assert sum(lengths) == points * multiple
    found = pipeline(tuple(n // multiple for n in lengths))
    assert found == min(map(pipeline, all_cuts(points, count)))


@in_parts(
    ("length", "overhead"),
    [(300, 2), (1000, 400), (4096, 30)],
    default=[(1000, 400)],
    full=[(300, 2)],
)
def test_a_long_sequence_is_cut_as_well_as_by_balancing_any_number(
    length: int, overhead: int
) -> None:
    """The best of all cuts in equal times is hardly better than what is found in pieces."""
    time = time_of(model_of(64), Fraction(overhead), Fraction(3, 2))

    def pipeline(lengths: tuple[int, ...], ranks: int, microbatches: int) -> int:
        times = [time(n, sum(lengths[:i])) for i, n in enumerate(lengths)]
        return microbatches * sum(times) + (ranks - 1) * max(times)

    for setting in ((2, 8), (4, 4), (16, 1)):
        ranks, microbatches = setting
        found = fastest_slices(time, length, ranks, microbatches=microbatches)
        assert sum(found) == length
        cuts = {n: balanced_slices(time.first, length, n) for n in range(1, 129)}
        best = min(pipeline(cut, *setting) for cut in cuts.values())
        assert pipeline(found, *setting) <= 1.005 * best
        for count in (3, 11):
            found = fastest_slices(time, length, ranks, microbatches=microbatches, count=count)
            assert len(found) == count
            assert pipeline(found, *setting) <= pipeline(cuts[count], *setting)


@pytest.mark.parametrize("count", [None, 5])
def test_no_cut_of_a_long_sequence_is_better_elsewhere_nearby(count: int | None) -> None:
    time = time_of(model_of(32), Fraction(200), Fraction(2))

    def longest(lengths: tuple[int, ...]) -> int:
        return max(time(n, sum(lengths[:i])) for i, n in enumerate(lengths))

    for length in (300, 1001, 5000):
        found = fastest_slices(time, length, 6, microbatches=3, count=count)
        for i in range(len(found) - 1):
            for to_the_left in (-2, -1, 1, 2):
                moved = list(found)
                moved[i] -= to_the_left
                moved[i + 1] += to_the_left
                assert longest(found) <= longest(tuple(moved))


def test_as_many_slices_as_there_can_be() -> None:
    time = time_of(model_of(16))
    assert fastest_slices(time, 300, 4, count=300) == (1,) * 300
    assert fastest_slices(time, 600, 4, count=300, multiple=2) == (2,) * 300
    assert len(fastest_slices(time, 1000, 4)) == 128, "without an overhead"


def test_fastest_slices_of_a_model_get_shorter_and_more_with_more_ranks() -> None:
    """Time: a fixed overhead, and what causal attention and linear parts take."""

    def time(length: int, context: int) -> int:
        return 300 + length * 4 + length * (2 * context + length)

    cuts = {ranks: fastest_slices(time, 128, ranks, multiple=8) for ranks in (1, 2, 4, 16)}
    assert cuts[1] == (128,), "one rank gains nothing from slices"
    assert [len(lengths) for lengths in cuts.values()] == sorted(map(len, cuts.values()))
    assert cuts[4][0] > cuts[4][-1]


def test_what_cannot_be_cut() -> None:
    model = model_of(16)
    for cut in (
        lambda length, count, multiple: balanced_slices(
            time_of(model).first, length, count, multiple
        ),
        lambda length, count, multiple: fastest_slices(
            lambda n, context: n, length, 2, count=count, multiple=multiple
        ),
    ):
        with pytest.raises(ConfigError, match=r"20 tokens is not a multiple of 8; .* 16 and 24"):
            cut(20, 2, 8)
        with pytest.raises(ConfigError, match=r"4 slices of a sequence of 24 .* expected 1 to 3"):
            cut(24, 4, 8)
