"""What is known of training with stale weights, seen in models of one weight for each stage."""

from __future__ import annotations

from math import isclose, pi, sin
from typing import Any

import pytest

from megapipe.testing import World, run_world
from tests.parity.async_toys import train
from tests.parity.tiers import in_parts

STALEST = 6
LR = 0.1


def amplitudes(world: World, share: float) -> list[float]:
    """Return how far each weight is in the end from its minimum 0; it begins at 1. The stiffness of
    a stage is `share` of the largest one at which its delay is stable."""
    delays = range(STALEST, -1, -1)
    limits = [2 * sin(pi / (4 * delay + 2)) for delay in delays]
    _, values = train(
        world, "stash", steps=120, lr=LR, stiffness=[share * limit / LR for limit in limits]
    )
    return [max(abs(each[stage]) for each in values[-30:]) for stage in range(len(limits))]


def below_and_above(world: World) -> tuple[list[float], list[float]]:
    return amplitudes(world, 0.85), amplitudes(world, 1.15)


@pytest.mark.full
def test_delayed_descent_is_stable_up_to_its_limit() -> None:
    """lr x stiffness < 2 sin(pi / (4 tau + 2)), for the delays tau 6 to 0 of seven stages."""
    ((below, above),) = run_world(1, below_and_above)
    assert len(below) == STALEST + 1
    assert max(below) < 0.3
    assert min(above) > 3


def several(world: World, settings: list[dict[str, Any]]) -> list[Any]:
    return [train(world, **given) for given in settings]


def ends(**settings: dict[str, Any]) -> dict[str, float]:
    """Return the largest weight of the last steps, by name."""
    (found,) = run_world(1, several, list(settings.values()))
    return {
        name: max(abs(weight) for weights in values[-20:] for weight in weights)
        for name, (_, values) in zip(settings, found, strict=True)
    }


STIFF: dict[str, Any] = {"steps": 120, "stiffness": [1.0] * 4, "slack": 3.0}
"""Settings of squares that hold a stage, and of terms that let it go: together 1."""


@pytest.mark.full
def test_latest_loses_to_stash_on_a_stiff_chain() -> None:
    """A gradient that comes from two versions is that of no loss: squares and terms no longer make
    up for each other."""
    found = ends(
        stash={"policy": "stash", "lr": 0.2, **STIFF},
        latest={"policy": "latest", "lr": 0.2, **STIFF},
    )
    assert found["stash"] < 1e-5
    assert found["latest"] > 1e6


@pytest.mark.full
def test_pipemares_chain_needs_smaller_rates_at_first_and_corrected_weights() -> None:
    """T1 and T2, at a learning rate that is far too large for stale weights until it has fallen."""
    base = {"lr": 0.8, "decays": True, **STIFF}
    found = ends(
        neither={"policy": "latest", **base},
        rates={"policy": "latest", "anneal": 90, **base},
        weights={"policy": "correct", **base},
        both={"policy": "correct", "anneal": 90, **base},
    )
    assert found["both"] < 0.1
    assert min(found[name] for name in ("neither", "rates", "weights")) > 100


@in_parts("microbatches", [1, 2], full=[2])
def test_constant_gradients_are_predicted_without_error(microbatches: int) -> None:
    """Once momentum is in its limit, the loss, which is linear in the weights that forwards read,
    is that of synchronous training, whose weights are always the same."""
    given = {
        "steps": 56,
        "lr": LR,
        "stiffness": [0.0] * 4,
        "slope": 1.0,
        "momentum": 0.5,
        "microbatches": microbatches,
    }
    policies = ("synchronous", "predict", "latest")
    (found,) = run_world(1, several, [{"policy": policy, **given} for policy in policies])
    (wanted, weights), (predicted, same), (latest, also) = found
    assert weights == same == also
    for step in range(48, 56):
        assert isclose(predicted[step], wanted[step], rel_tol=1e-12)
        assert latest[step] - wanted[step] > LR
