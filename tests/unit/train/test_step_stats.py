"""What ranks tell each other of a step."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.distributed.mesh import Axis, sum_in_pairs
from megapipe.layers.scratch import Scratch
from megapipe.train.feed import LocalTokens
from megapipe.train.step.local_stats import local_loss
from megapipe.train.step_stats import RankRequests, StepStats

SQUARES = (1.0, 4.0, 20.0)
"""Squared norms of two stages and of the tied embedding."""
COUNTS = st.integers(1, 5)
VALUES = st.floats(0, 1e300) | st.just(math.inf) | st.just(math.nan)


def test_what_is_packed_is_unpacked() -> None:
    for requests in map(RankRequests._make, itertools.product((False, True), repeat=3)):
        totals = StepStats(SQUARES, 3.5, 7, requests, memory_gib=0.25)
        assert StepStats.unpack(totals.pack()) == totals


def test_sums() -> None:
    """The ranks hold different stages; two of them were asked to stop."""
    first = StepStats((1.0, 0.0, 20.0), 0.0, 0).pack()
    second = StepStats((0.0, 4.0, 0.0), 3.5, 7, RankRequests(stop=True)).pack()
    both = StepStats.unpack(first + second + second)
    assert both == StepStats((1.0, 8.0, 20.0), 7.0, 14, RankRequests(stop=True))


def test_norm_and_loss() -> None:
    totals = StepStats(SQUARES, 3.5, 7)
    assert totals.norm == 5.0
    assert totals.loss == 0.5
    assert totals.finite


def test_the_norm_is_added_in_the_order_of_stages() -> None:
    """2^53 swallows a 1, but not two of them added up before."""
    assert StepStats((2.0**53, 1.0, 1.0), 0.0, 1).norm == math.sqrt(2.0**53)
    assert StepStats((1.0, 1.0, 2.0**53), 0.0, 1).norm == math.sqrt(2.0**53 + 2)


def test_no_tokens_make_a_loss_of_zero() -> None:
    assert StepStats(SQUARES, 0.0, 0).loss == 0.0


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("at", "text"),
    [
        ((0,), "gradients of stages 0"),
        ((0, 1), "gradients of stages 0, 1"),
        ((2,), "gradients of the tied embedding"),
        ((1, 2), "gradients of stages 1 and the tied embedding"),
        ((), "gradients of no stage"),
    ],
)
def test_where_it_is_not_finite(wrong: float, at: tuple[int, ...], text: str) -> None:
    squares = tuple(wrong if i in at else square for i, square in enumerate(SQUARES))
    totals = StepStats(squares, 1.0, 1)
    assert totals.finite is not bool(at)
    assert totals.not_finite() == text


@pytest.mark.parametrize("wrong", [math.inf, math.nan])
def test_a_loss_that_is_not_finite(wrong: float) -> None:
    assert not StepStats(SQUARES, wrong, 1).finite


@pytest.mark.parametrize("loss", [3.5, math.inf, math.nan])
@pytest.mark.parametrize("index", [0, 1])
def test_the_first_tp_rank_counts_a_loss_and_all_tell_one_that_is_not_finite(
    index: int, loss: float
) -> None:
    """So it is for a mixture, too: each tp rank has computed all losses."""
    tp = Axis(2, index, (0, 1), None)
    step: Any = SimpleNamespace(
        mesh=SimpleNamespace(tp=tp, device=torch.device("cpu")),
        last=SimpleNamespace(loss_sums={(0, 0): torch.tensor([loss], dtype=torch.float64)}),
    )
    scratches = [Scratch()]
    given = LocalTokens(7, (3, 4), [torch.tensor([1.5, 2.0])], scratches)
    total, counted = local_loss(step, given)
    first = index == 0
    assert math.isfinite(total.item()) == math.isfinite(loss)
    assert not math.isfinite(loss) or total.item() == loss * first
    assert (counted.tokens, counted.by_source) == ((7, (3, 4)) if first else (0, (0, 0)))
    assert [losses.tolist() for losses in counted.summed_losses()] == [[1.5 * first, 2.0 * first]]
    assert counted.scratches is scratches, "of the tokens of each rank alone"


def test_squares_whose_sum_overflows_are_not_finite() -> None:
    assert not StepStats((1e308, 1e308, 0.0), 0.0, 1).finite


@given(st.data(), COUNTS, COUNTS)
def test_what_a_part_of_the_ranks_forbids_the_whole_does(
    data: st.DataObject, ranks: int, buckets: int
) -> None:
    """No sum over more ranks, in whichever order, has a smaller norm, or is finite again."""
    rows = [
        StepStats(tuple(data.draw(VALUES) for _ in range(buckets)), 0.0, 0).pack()
        for _ in range(ranks)
    ]
    whole = StepStats.unpack(sum_in_pairs(torch.stack(rows)))
    for row in rows:
        part = StepStats.unpack(row)
        assert part.finite or not whole.finite
        assert not part.norm > whole.norm
