"""ZeRO-0 and ZeRO-1 on several processes: the same bits, slices that cover everything, resuming."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.checkpoint.regions import flat_regions
from megapipe.distributed.mesh import Grid
from megapipe.layers.parameter import LocalParameter
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.ranks import Case, Rows, _global, assemble, configure, run_case, take_region

CASE = Case(dp=2, tp=2, m=2, dtype="fp32", layers=1, sequence_parallel=True)
REPLICATED = replace(CASE, tp=1, pp=2, schedule="chimera", sequence_parallel=False)
"""Both pipeline ranks hold both stages: shards are over dp x 2."""
PARAMS = reference.init_random(configure(CASE)[0].model, seed=3)


def both_stages(world: World, case: Case) -> list[Any]:
    """Run the same steps without and with sharding."""
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
    """Return the values of this rank's shards, by kind, and whether one ends within a parameter."""
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
    """Train three steps in one go, and again with the state after two handed to a new optimizer."""
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


@pytest.mark.full
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
