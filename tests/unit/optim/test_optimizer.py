"""ZeRO-0 and ZeRO-1 are the same arithmetic; slices, clipping, weight decay, resuming."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.checkpoint.regions import flat_regions
from megapipe.config import OptimizerConfig
from megapipe.distributed.mesh import Axis, Grid
from megapipe.layers.parameter import LocalParameter, Sharding
from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.numbers_config import NumbersConfig
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.optim.optimizer import Optimizer
from megapipe.optim.scaler import LossScaler
from megapipe.testing import World, run_world
from megapipe.train.expert_maps import ExpertMaps
from megapipe.train.routing_state import RoutingState
from megapipe.train.step import TrainStep
from megapipe.train.totals import Totals
from megapipe.train.update import Update
from tests.parity import reference
from tests.parity.ranks import Case, Rows, _global, assemble, configure, run_case, take_region

CASE = Case(dp=2, tp=2, m=2, dtype="fp32", layers=1, sequence_parallel=True)
REPLICATED = replace(CASE, tp=1, pp=2, schedule="chimera", sequence_parallel=False)
"""Both pipeline ranks hold both stages: shards are over dp x 2."""
PARAMS = reference.init_random(configure(CASE)[0].model, seed=3)


def both_stages(world: World, case: Case) -> list[Any]:
    """The same steps without and with sharding."""
    return [run_case(world, replace(case, zero=zero), validate=False) for zero in (0, 1)]


ODD = replace(CASE, dp=4, tp=1, model="mixed", masked=0.3, sequence_parallel=False)
"""Slices of lengths that vector instructions do not divide."""


@pytest.mark.parametrize(
    "case", [replace(CASE, tp=1), REPLICATED, ODD], ids=["plain", "replicated", "odd"]
)
def test_sharding_changes_no_bit(case: Case) -> None:
    for replicated, sharded in run_world(case.world, both_stages, case):
        assert replicated.losses == sharded.losses
        assert replicated.norms == sharded.norms
        for mine, theirs in zip(replicated.copies, sharded.copies, strict=True):
            for (name, _, a), (other, _, b) in zip(mine, theirs, strict=True):
                assert name == other
                assert (a == b).all(), name


Parts = dict[str, list[tuple[str, Any, Any]]]


def slices(step: TrainStep) -> tuple[Parts, bool]:
    """What this rank answers for, by kind of value; whether a slice ends within a parameter."""
    parts: Parts = {}
    cuts = False
    for own in step.optimizer.own_slices():
        cuts |= own.start > 0 or own.stop < own.spec.numel
        for kind, values in own.values.items():
            assert values.shape == (own.stop - own.start,)
            for position, local in flat_regions(own.spec.sizes, own.start, own.stop):
                region = values[position : position + local.numel].view(local.sizes)
                parts.setdefault(kind, []).extend(_global(own.spec, local, region))
    return parts, cuts


def resume(world: World, case: Case) -> dict[str, Any]:
    """Three steps in one go, and the same with the state after two handed to a new optimizer."""
    config, layout = configure(case)
    rows = Rows(case)
    step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))
    step.optimizer.set_weights(lambda spec, out: take_region(PARAMS[spec.name], spec, out))
    before, cuts = slices(step)
    for i in range(2):
        step.train(i, rows)
    after, _ = slices(step)
    everyone: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(everyone, after)
    full = {kind: assemble([parts[kind] for parts in everyone], PARAMS) for kind in sorted(after)}
    last = step.train(2, rows)
    end, _ = slices(step)

    again = TrainStep(config, layout, step.mesh)
    again.optimizer.set_weights(lambda spec, out: take_region(full["model"][spec.name], spec, out))

    def moment(name: str, spec: LocalParameter, out: Tensor) -> None:
        take_region(full[f"optimizer.{name}"][spec.name], spec, out)

    again.optimizer.set_states(2, moment)
    repeated = again.train(2, rows)
    assert repeated == last
    repeated_end, _ = slices(again)
    for kind, parts in end.items():
        for (name, region, a), (other, other_region, b) in zip(
            parts, repeated_end[kind], strict=True
        ):
            assert (name, region) == (other, other_region)
            assert (a == b).all(), f"{kind} {name} after resuming"
    return {
        "before": before,
        "after": after,
        "cuts": cuts,
        "masters": [shard.stop - shard.start for shard in step.optimizer.shards],
        "buckets": [shard.bucket.numel for shard in step.optimizer.shards],
    }


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("case", "share"), [(CASE, 2), (REPLICATED, 4)], ids=["plain", "replicated"]
)
def test_slices_cover_every_element_once_and_resume_bitwise(
    case: Case, share: int, zero: int
) -> None:
    ranks = run_world(4, resume, replace(case, zero=zero))
    weights = assemble([rank["before"]["model"] for rank in ranks], PARAMS)
    for name, tensor in weights.items():
        assert tensor.equal(PARAMS[name].float().double()), f"{name}: some element is nobody's"
    for moment in ("exp_avg", "exp_avg_sq"):
        full = assemble([rank["after"][f"optimizer.{moment}"] for rank in ranks], PARAMS)
        assert not any(tensor.isnan().any() for tensor in full.values())
        assert all(tensor.any() for tensor in full.values())
    assert any(rank["cuts"] for rank in ranks), "slices ignore parameter boundaries"
    for rank in ranks:
        assert rank["masters"] == [n // (share if zero else 1) for n in rank["buckets"]]


def alone(**settings: Any) -> tuple[Optimizer, Bucket]:
    """The optimizer of a small bf16 stage in one process, with random weights and gradients."""
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
    """The master weights of the only bucket."""
    (shard,) = optimizer.shards
    return shard.store.read("model", 0, shard.bucket.numel)


def reduced(optimizer: Optimizer) -> Tensor:
    """The squared norms, after the reductions that a program would have asked for."""
    optimizer.reduce(0)
    return optimizer.finish_reduce()


@pytest.mark.parametrize(("clip", "active"), [(0.5, True), (1e6, False), (None, False)])
def test_gradients_are_clipped_by_the_global_norm(clip: float | None, active: bool) -> None:
    optimizer, bucket = alone(clip=clip)
    given = bucket.grads[0].clone()
    scaler, numbers = LossScaler(optimizer.config, "bf16"), NumbersConfig()
    kept = RoutingState({}), ExpertMaps({})
    update = Update(optimizer.config, optimizer, scaler, *kept, 1, numbers, exact=True)
    totals = Totals(tuple(reduced(optimizer).tolist()), 0.0, 1)
    assert totals.norm == pytest.approx(given.double().norm().item(), rel=1e-12)
    optimizer.update(1e-3, update.clipping(totals.norm))
    used = optimizer.shards[0].grad
    if active:
        assert clip is not None
        torch.testing.assert_close(used, given * (clip / totals.norm))
    else:
        assert used.equal(given), "not even rounding"


def test_an_update_is_torch_s_adamw_with_decay_for_matrices_alone() -> None:
    optimizer, bucket = alone(clip=None, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-6)
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


def test_small_updates_are_kept_in_full_precision() -> None:
    """An update too small for bf16 to show moves the master weights all the same."""
    optimizer, bucket = alone(clip=None, weight_decay=0.0)
    bucket.grads[0].fill_(1.0)
    weights, master = bucket.weights.clone(), masters(optimizer).clone()
    reduced(optimizer)
    optimizer.update(1e-6)
    moved = master - masters(optimizer)
    assert moved[: bucket.entries[-1].stop].abs().sum() > 0
    assert (bucket.weights == weights).double().mean() > 0.9
