"""The velocity of weights: the mean of their last updates, wherever and however states are kept."""

from __future__ import annotations

from fractions import Fraction
from math import exp, isclose
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.config import OptimizerConfig
from megapipe.config.update_rules import RULES
from megapipe.distributed.mesh import Axis
from megapipe.optim.rules import build_rule
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import VELOCITY, StatePolicy
from megapipe.optim.velocity import decay, followed, predict_older_weights
from tests.parity.optim_rules import make_shard

ALONE = Axis.alone()
GAMMA, STEPS = 0.75, 3


def read(shard: Shard, name: str) -> Tensor:
    return shard.store.read(name, 0, shard.stop).to(torch.float64, copy=True)


def follow(rule_name: str, dtype: str, tolerance: float, **policy: Any) -> Shard:
    """Take some steps and compare them with the plain formula."""
    rule = build_rule(OptimizerConfig(rule=rule_name))
    kept = StatePolicy(separate_masters=True, window_bytes=1 << 14, **policy)
    shard = make_shard(rule, ALONE, ALONE, dtype, kept, velocity=True)
    assert shard.store.states == (*rule.states, VELOCITY)
    wanted = torch.zeros_like(read(shard, VELOCITY))
    assert read(shard, VELOCITY).equal(wanted)
    torch.manual_seed(0)
    for count in range(STEPS):
        before = read(shard, "model")
        shard.grad = torch.randn(shard.stop).to(shard.bucket.grads[0].dtype)
        shard.store.begin(count)
        with followed([shard], {0: GAMMA}):
            rule.step([shard], 1e-2, count)
        wanted = GAMMA * wanted + (1 - GAMMA) * (read(shard, "model") - before)
        assert wanted.any()
        torch.testing.assert_close(read(shard, VELOCITY), wanted, rtol=0, atol=tolerance)
    return shard


@pytest.mark.parametrize("name", RULES)
def test_it_is_the_mean_of_the_updates_of_any_rule(name: str) -> None:
    follow(name, "fp64", 1e-14)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_it_lives_with_the_masters_in_their_type(place: Any, tmp_path: Path) -> None:
    shard = follow("adamw", "bf16", 1e-5, place=place, folder=tmp_path, state_dtype="bf16")
    velocity = shard.store.read(VELOCITY, 0, shard.stop)
    assert velocity.dtype == torch.float32
    bytes_kept = getattr(shard.store.nbytes(), place)
    assert bytes_kept == shard.stop * (4 + 2 * 2 + 4), "master, two states, velocity"


@pytest.mark.parametrize("updates", [0.5, 3.0])
def test_weights_are_moved_back_by_it(updates: float) -> None:
    shard = follow("adamw", "fp64", 1e-14)
    out = torch.empty(shard.stop, dtype=torch.float64)
    predict_older_weights(shard, updates, out)
    wanted = read(shard, "model") - updates * read(shard, VELOCITY)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-15)
    assert not out.equal(read(shard, "model"))


def test_a_shard_that_keeps_none_is_left_alone() -> None:
    rule = build_rule(OptimizerConfig(rule="sgd"))
    shard = make_shard(rule, ALONE, ALONE, policy=StatePolicy(separate_masters=True))
    shard.grad = torch.ones(shard.stop, dtype=torch.float64)
    with followed([shard], {1: GAMMA}):
        rule.step([shard], 1e-2, 0)
    assert VELOCITY not in shard.store.states


def test_it_forgets_all_but_d_in_the_updates_that_it_moves_back() -> None:
    for updates in (Fraction(1, 4), Fraction(1), Fraction(7, 2)):
        assert isclose(decay(None, updates) ** float(updates), exp(-2))
        assert isclose(decay(0.5, updates) ** float(updates), 0.5)
