"""What each update rule declares of itself is what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.config import OptimizerConfig
from megapipe.config.update_rules import RULES
from megapipe.distributed.mesh import Axis
from megapipe.ops.adam import AdamStep, torch_adam
from megapipe.optim.rules import Rule, build_rule
from megapipe.optim.shard import Shard
from tests.parity.optim_rules import PLAIN, draw, make_shard, model, set_grad

ALONE = Axis.alone()
OWN = "tests.parity.user_code_samples"
CONFIGS = {name: plain.config for name, plain in PLAIN.items()} | {
    name: OptimizerConfig(rule=f"{OWN}:{name}")
    for name in ("Lion", "AdamW", "LAMB", "Three", "OnlyStep")
}
Step = Callable[..., Any]


def step_twice(
    config: OptimizerConfig, change: Callable[[Tensor], None] = lambda grad: None
) -> tuple[Rule, Shard]:
    """Step twice on a whole model; `change` is applied to the gradients [n] of both steps."""
    rule = build_rule(config)
    shard = make_shard(rule, ALONE, ALONE)
    for count in range(2):
        set_grad(shard, draw(model(), "grad", count, torch.float64), torch.float64)
        change(shard.grad)
        rule.step([shard], 1e-2, count)
    return rule, shard


def values(rule: Rule, shard: Shard) -> dict[str, Tensor]:
    length = shard.stop - shard.start
    return {name: shard.store.read(name, 0, length) for name in ("model", *rule.states)}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_state_that_is_declared_is_used(name: str) -> None:
    rule, shard = step_twice(CONFIGS[name])
    assert all(state.any() for state in values(rule, shard).values())
    others = {key: value for key, value in vars(rule).items() if isinstance(value, Tensor)}
    assert not others, "state that is neither planned nor saved"


@pytest.mark.parametrize("name", CONFIGS)
def test_elementwise_rules_and_no_others_update_each_weight_by_itself(name: str) -> None:
    """Another gradient of one weight of a matrix changes that weight, and no other's update."""

    def change(grad: Tensor) -> None:
        grad[at] *= -3.0

    rule, shard = step_twice(CONFIGS[name])
    (entry,) = [e for e in shard.bucket.entries if e.spec.name == "layers.1.mlp.down.weight"]
    at = entry.start + 17
    found = values(*step_twice(CONFIGS[name], change))
    changed = {k: (v != found[k]).nonzero()[:, 0].tolist() for k, v in values(rule, shard).items()}
    assert at in changed["model"]
    alone = all(places in ([], [at]) for places in changed.values())
    assert alone == rule.declaration.elementwise


@pytest.mark.parametrize("name", CONFIGS)
def test_rules_that_take_the_kernel_call_it_and_no_others_do(name: str) -> None:
    calls = []

    def kernel(*tensors: Any) -> None:
        calls.append(tensors[-1])
        torch_adam(*tensors)

    rule = build_rule(CONFIGS[name], kernel)
    shard = make_shard(rule, ALONE, ALONE)
    set_grad(shard, draw(model(), "grad", 0, torch.float64), torch.float64)
    rule.step([shard], 1e-2, 0)
    assert all(isinstance(step, AdamStep) for step in calls)
    assert bool(calls) == rule.declaration.takes_kernel


@pytest.mark.parametrize("name", RULES)
def test_a_registered_rule_is_the_one_declared(name: str) -> None:
    assert build_rule(OptimizerConfig(rule=name)).declaration is RULES[name]
