"""The update of one process: clipping, weight decay, full precision."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megapipe.config.config import OptimizerConfig
from megapipe.config.health import HealthConfig
from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Axis, Grid
from megapipe.layers.parameter import LocalParameter, Sharding
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.optim.loss_scaler import LossScaler
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.rules import build_rule
from megapipe.train.step_stats import StepStats
from megapipe.train.update import Update


def alone(**settings: Any) -> tuple[Optimizer, Bucket]:
    """Make a small bf16 stage's optimizer in one process, with random weights and gradients."""
    model = ModelConfig(layers=1, hidden=6, heads=2, vocab_size=11, dtype="bf16").resolved(
        vocab_size=11, sequence_length=5
    )
    spec = StageSpec(embedding=False, layers=range(1), head=False)
    module = GPTStage(model, spec, Sharding(Axis.alone(), False, torch.bfloat16))
    bucket = Bucket(0, list(owned_parameters(module)), Axis.alone(), torch.device("cpu"))
    mesh: Any = SimpleNamespace(
        device=torch.device("cpu"),
        tp=Axis.alone(),
        grid=Grid(),
        ordered_sum=lambda vector, *axes: vector,
    )
    config = OptimizerConfig.model_validate(settings)
    optimizer = Optimizer([bucket], config, mesh, stages=1)
    generator = torch.Generator().manual_seed(1)

    def draw(spec: LocalParameter, out: Tensor) -> None:
        out.copy_(torch.randn(out.shape, generator=generator))

    optimizer.set_weights(draw)
    for entry in bucket.entries:
        draw(entry.spec, bucket.view(bucket.grads[0], entry))
    return optimizer, bucket


def masters(optimizer: Optimizer) -> Tensor:
    """Return the master weights of the only bucket."""
    (shard,) = optimizer.shards
    return shard.store.read("model", 0, shard.bucket.numel)


def reduced(optimizer: Optimizer) -> Tensor:
    """Return the squared norms, after the reductions that a program would have asked for."""
    optimizer.reduce(0)
    return optimizer.finish_reduce()


@pytest.mark.parametrize(("clip", "active"), [(0.5, True), (1e6, False), (None, False)])
def test_gradients_are_clipped_by_the_global_norm(clip: float | None, active: bool) -> None:
    optimizer, bucket = alone(max_grad_norm=clip)
    given = bucket.grads[0].clone()
    scaler, numbers = LossScaler(optimizer.config, "bf16"), HealthConfig()
    update = Update(optimizer.config, optimizer, scaler, [], 1, numbers, exact=True)
    totals = StepStats(tuple(reduced(optimizer).tolist()), 0.0, 1)
    assert totals.norm == pytest.approx(given.double().norm().item(), rel=1e-12)
    optimizer.update(1e-3, update.clipping(totals.norm))
    used = optimizer.shards[0].grad
    if active:
        assert clip is not None
        torch.testing.assert_close(used, given * (clip / totals.norm))
    else:
        assert used.equal(given), "not even rounding"


def test_an_update_is_torch_s_adamw_with_decay_for_matrices_alone() -> None:
    optimizer, bucket = alone(
        max_grad_norm=None, weight_decay=0.3, options={"betas": [0.8, 0.9], "eps": 1e-6}
    )
    master = masters(optimizer)
    plain = {
        entry.spec.name: torch.nn.Parameter(bucket.view(master, entry).clone())
        for entry in bucket.entries
    }
    matrices = [p for p in plain.values() if p.dim() == 2]
    others = [p for p in plain.values() if p.dim() == 1]
    assert (len(matrices), len(others)) == (4, 8)
    rule = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}],
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for lr in (1e-2, 5e-3):
        for entry in bucket.entries:
            plain[entry.spec.name].grad = bucket.view(bucket.grads[0], entry).clone()
        for group in rule.param_groups:
            group["lr"] = lr
        rule.step()
        reduced(optimizer)
        optimizer.update(lr)
    for entry in bucket.entries:
        values = bucket.view(master, entry)
        torch.testing.assert_close(values, plain[entry.spec.name].detach())
        assert bucket.view(bucket.weights, entry).equal(values.bfloat16()), "published"


def test_weights_look_as_far_ahead_after_a_resume() -> None:
    """They use the count of updates and the last learning rate, which are saved."""
    first, bucket = alone(max_grad_norm=None, weight_prediction=2)
    reduced(first)
    first.update(1e-2)
    first.await_all_weights()
    again, loaded = alone(max_grad_norm=None, weight_prediction=2)
    saved = {
        (own.spec.name, kind): v for own in first.own_slices() for kind, v in own.values.items()
    }
    again.set_weights(lambda spec, out: out.view(-1).copy_(saved[spec.name, "model"]))

    def fill(name: str, spec: LocalParameter, out: Tensor) -> None:
        out.view(-1).copy_(saved[spec.name, f"optimizer.{name}"])

    again.set_states(first.count, fill, lr=first.lr)
    assert masters(again).equal(masters(first))
    assert loaded.weights.equal(bucket.weights)
    assert not loaded.weights.equal(masters(again).bfloat16()), "ahead"


@pytest.mark.parametrize(("rule", "elementwise"), [("muon", False), ("adamw", True)])
def test_experts_are_whole_over_etp_and_other_weights_over_tp(rule: str, elementwise: bool) -> None:
    """Rules that take whole matrices gather parts of them from these; others need none."""
    tp, etp = Axis(2, 1, (4, 5), None), Axis(4, 1, (4, 5, 6, 7), None)
    own: Any = SimpleNamespace(
        mesh=SimpleNamespace(tp=tp, etp=etp, rank=5), rule=build_rule(OptimizerConfig(rule=rule))
    )
    dense, experts = (SimpleNamespace(over_ep=value) for value in (False, True))
    assert Optimizer._parts_of(own, cast(Any, dense)) is tp
    found = Optimizer._parts_of(own, cast(Any, experts))
    assert found.ranks == ((5,) if elementwise else etp.ranks)


def test_small_updates_are_kept_in_full_precision() -> None:
    """An update too small for bf16 to show moves the master weights all the same."""
    optimizer, bucket = alone(max_grad_norm=None, weight_decay=0.0)
    bucket.grads[0].fill_(1.0)
    weights, master = bucket.weights.clone(), masters(optimizer).clone()
    reduced(optimizer)
    optimizer.update(1e-6)
    moved = master - masters(optimizer)
    assert moved[: bucket.entries[-1].stop].abs().sum() > 0
    assert (bucket.weights == weights).double().mean() > 0.9
