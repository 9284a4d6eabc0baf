"""Predictions of weights: without error where the step stays the same, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.cli import parse
from megapipe.config.config import OptimizerConfig
from megapipe.config.update_rules import RULES
from megapipe.distributed.mesh import Axis
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from megapipe.optim.rules import Rule, build_rule
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import StatePolicy
from megapipe.optim.weight_prediction import predict
from tests.parity.optim_rules import make_shard

ALONE = Axis.alone()
LR, STEPS = 1e-2, 3


def shard_of(config: OptimizerConfig) -> tuple[Rule, Shard]:
    rule = build_rule(config)
    return rule, make_shard(rule, ALONE, ALONE, policy=StatePolicy(separate_masters=True))


def masters(shard: Shard) -> Tensor:
    return shard.store.read("model", 0, shard.stop).clone()


@pytest.mark.parametrize("nesterov", [False, True])
def test_constant_gradients_are_predicted_without_error(nesterov: bool) -> None:
    """The momentum stands at its limit g / (1 - momentum), so that every step is the same."""
    options: Any = {"momentum": 0.75, "nesterov": nesterov}
    rule, shard = shard_of(OptimizerConfig(rule="sgd", options=options, weight_decay=0.0))
    torch.manual_seed(0)
    grad = torch.randn(shard.stop, dtype=torch.float64)
    shard.store.write("momentum_buffer", 0, shard.stop, grad / 0.25)
    ahead = torch.empty_like(grad)
    predict(rule, shard, STEPS * LR, 1, ahead)
    for count in range(STEPS):
        shard.grad = grad.clone()
        rule.step([shard], LR, count)
    used = torch.zeros(shard.stop, dtype=torch.bool)
    for segment in shard.segments:
        used[segment.start : segment.stop] = True
    assert used.any()
    torch.testing.assert_close(ahead[used], masters(shard)[used], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in RULES if RULES[name].has_direction])
def test_a_prediction_changes_nothing_but_its_output(name: str) -> None:
    rule, shard = shard_of(OptimizerConfig(rule=name))
    predict(rule, shard, LR, 0, shard.weights)
    assert shard.weights.equal(masters(shard)), "no update was made"
    shard.grad = torch.ones(shard.stop, dtype=torch.float64)
    rule.step([shard], LR, 0)
    before = [shard.store.read(state, 0, shard.stop).clone() for state in rule.states]
    weights = masters(shard)
    predict(rule, shard, LR, 1, shard.weights)
    assert not shard.weights.equal(weights)
    assert masters(shard).equal(weights)
    for state, values in zip(rule.states, before, strict=True):
        assert shard.store.read(state, 0, shard.stop).equal(values)
    predict(rule, shard, 0.0, 1, shard.weights)
    assert shard.weights.equal(weights)


@pytest.mark.parametrize("name", [name for name in RULES if not RULES[name].has_direction])
def test_rules_without_a_direction_are_refused(name: str) -> None:
    with pytest.raises(
        ConfigError,
        match="weight_prediction=2 needs optimizer.rule=adamw, adam, sgd, lion, rmsprop, nadamw, "
        f"adabelief or adam3, not {name}$",
    ):
        resolve(parse([f"optimizer.rule={name}", "optimizer.weight_prediction=2"]).config, 1, None)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            (
                "optimizer.rule=sgd",
                "optimizer.options.momentum=0",
                "optimizer.options.nesterov=false",
            ),
            "optimizer.options.momentum above 0 with sgd",
        ),
        (
            ("optimizer.rule=rmsprop", "optimizer.options.momentum=0"),
            "optimizer.options.momentum above 0 with rmsprop",
        ),
        (("model.dtype=fp16",), "model.dtype=bf16, fp32 or fp64, not fp16"),
        (
            ("model.dtype=bf16", "optimizer.master_weights=none"),
            "optimizer.master_weights=fp32, not none",
        ),
        (("optimizer.state_dtype=bf16",), "optimizer.state_dtype=fp32, not bf16"),
        (("optimizer.offload=host",), "optimizer.offload=none, not host"),
        (("optimizer.post_validation=true",), "optimizer.post_validation=false"),
    ],
    ids=str,
)
def test_what_a_prediction_cannot_read_or_undo_is_refused(
    keys: tuple[str, ...], message: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"^configuration: optimizer.weight_prediction=1 needs {message}$"
    ):
        resolve(parse([*keys, "optimizer.weight_prediction=1"]).config, 1, None)
