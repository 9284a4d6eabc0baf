"""Maps of experts that follow the choices of a step, by themselves."""

from __future__ import annotations

import random
from typing import cast

import pytest

from megapipe.experts.map import ExpertMap
from megapipe.experts.row_routing import evenly
from megapipe.experts.shadow import ShadowCosts
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.plan.moe.placement import by_balance, by_shadows
from megapipe.train.moe.expert_rebalancing import ExpertRebalancer
from tests.parity.in_memory_models import HeldWeights

EXPERTS = {1: 4, 3: 4}
SKEWED = [8.0, 8.0, 1.0, 0.0, *(9, 1, 1, 1), 8.0, 9.0, 1.0, 2.0, *(3, 3, 3, 3)]
"""Four numbers of each layer, and the choices of each of its experts."""
POLICIES = {"balance": by_balance(4), "shadow": by_shadows(ShadowCosts(1, 1, 3))}


class Taken:
    """A stand-in for a layer's expert replicas: the map that it was given."""

    def __init__(self) -> None:
        self.map = ExpertMap.even(4, 2, 2)

    def set_map(self, after: ExpertMap) -> None:
        self.map = after


def maps(every: int = 1, policy: str = "balance") -> ExpertRebalancer:
    """Make the rebalancer of a rank that has layer 1."""
    places = {1: cast(ExpertReplicas, Taken())}
    return ExpertRebalancer(EXPERTS, every, {1: POLICIES[policy]}, places)


def test_copies_are_chosen_every_so_many_steps() -> None:
    found = maps(every=3)
    for step in range(2):
        assert found.after_update(step, SKEWED) is None
        assert not any(found.replicas[1].map.replicas)
    assert found.after_update(2, SKEWED) == "step 3: experts with replicas: 1, in layer 1"
    assert found.after_update(5, SKEWED) is None, "they are those that there are"
    assert found.replicas[1].map.replicas == ((), (0,))
    assert {layer: counts.tolist() for layer, counts in found.counts.items()} == {
        1: [9, 1, 1, 1],
        3: [3, 3, 3, 3],
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_they_are_saved_as_the_choices_that_they_follow_from(policy: str) -> None:
    saved, loaded = maps(policy=policy), maps(policy=policy)
    saved.after_update(0, SKEWED)
    assert saved.entries() == [f"routing/layers.{n}.moe.copies.counts" for n in EXPERTS]
    held = HeldWeights({piece.name: piece.tensor.clone() for piece in saved.tensors()})
    loaded.read(held, saved.entries())
    assert loaded.replicas[1].map == saved.replicas[1].map
    assert any(loaded.replicas[1].map.replicas)
    loaded.read(held, ())
    assert not any(loaded.replicas[1].map.replicas), "of a checkpoint without them"


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_follow_from_choices_and_from_no_earlier_copies(policy: str) -> None:
    """A run that resumes therefore has the replicas of the one that was stopped."""
    rng, choose = random.Random(0), POLICIES[policy]
    even, seen = ExpertMap.even(8, 4, 2), set()
    for _ in range(20):
        totals = [rng.randrange(50) for _ in range(8)]
        before = even.with_replicas([[], [0, 7], [1], [3, 5]])
        found = {choose(present, evenly(totals, 4), totals) for present in (even, before)}
        assert len(found) == 1
        seen |= found
    assert len(seen) > 1


def test_where_maps_stay_nothing_is_kept() -> None:
    found = ExpertRebalancer({})
    found.after_update(0, [])
    assert not found.entries()
    assert not list(found.tensors())
