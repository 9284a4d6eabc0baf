"""Policies on the choices of a run whose experts are chosen unevenly, first these and then those:
``recorded/config.yaml`` says how it was made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from megapipe.experts.balance import balance
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import balanced_owners, find_pool, largest_load, migrate
from megapipe.experts.row_routing import evenly, tokens_per_rank
from megapipe.plan.moe.commands.recorded import recorded

RANKS = 4
CHOICES = recorded(Path(__file__).parent / "recorded/log.jsonl")
LAYERS = (1, 2)

Decide = Callable[[ExpertMap, Sequence[int]], ExpertMap]


def trace(layer: int) -> list[Sequence[int]]:
    return [CHOICES[step][layer] for step in sorted(CHOICES)]


def replayed(steps: Sequence[Sequence[int]], slots: int, decide: Decide) -> float:
    """Return the largest load over the mean, on average over the steps but the first. Each step has
    the map that the choices of the step before decide."""
    present, found = ExpertMap.even(16, RANKS, slots), 0.0
    for last, totals in pairwise(steps):
        present = decide(present, last)
        found += max(tokens_per_rank(present, evenly(totals, RANKS), RANKS)) * RANKS / sum(totals)
    return found / (len(steps) - 1)


def static(steps: Sequence[Sequence[int]], owners: ExpertMap) -> float:
    return replayed(steps, 0, lambda *_: owners)


def test_the_record_is_whole() -> None:
    """120 steps of 8 samples of 128 tokens, of which each has chosen two experts."""
    assert sorted(CHOICES) == list(range(1, 121))
    assert {sum(own) for layers in CHOICES.values() for own in layers.values()} == {2 * 8 * 128}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_pool_beats_owners_that_stay(layer: int) -> None:
    """SmartMoE: it also beats the best owners for the sum of all steps."""
    steps, begin = trace(layer), ExpertMap.even(16, RANKS)
    sums = list(map(sum, zip(*steps, strict=True)))
    stay = min(static(steps, begin), static(steps, balanced_owners(begin, sums)))
    pool = find_pool(begin, steps, 4)
    changing = replayed(steps, 0, lambda present, last: migrate(present, pool, last))
    assert changing - 1 < 0.8 * (stay - 1)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_pool_of_earlier_steps_serves_later_ones(layer: int) -> None:
    """A pool from the first half of the steps beats, in the second half, the owners that a run
    begins with and the best owners for the first half."""
    steps, begin = trace(layer), ExpertMap.even(16, RANKS)
    first, second = steps[:60], steps[60:]
    sums = list(map(sum, zip(*first, strict=True)))
    stay = min(static(second, begin), static(second, balanced_owners(begin, sums)))
    pool = find_pool(begin, first, 4)
    assert replayed(second, 0, lambda present, last: migrate(present, pool, last)) < stay


@pytest.mark.parametrize("layer", LAYERS)
def test_copies_halve_the_excess(layer: int) -> None:
    """Prophet: two replicas on each rank, decided by the step before, halve what the largest load
    exceeds the mean by. Every third step and the next are tested."""
    before = after = 0.0
    for last, totals in list(pairwise(trace(layer)))[::3]:
        begin = ExpertMap.even(16, RANKS, 2)
        found = balance(begin, evenly(last, RANKS), RANKS)
        mean = sum(totals) / RANKS
        before += largest_load(begin, totals) - mean
        after += max(tokens_per_rank(found, evenly(totals, RANKS), RANKS)) - mean
    assert after <= before / 2
