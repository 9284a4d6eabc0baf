"""Which part of a global tensor a rank holds."""

from __future__ import annotations

import random

import pytest
import torch

from megapipe.checkpoint.regions import flat_regions, whole
from megapipe.distributed.mesh import Axis
from megapipe.experts.map import ExpertMap
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from megapipe.layers.moe.owners import ExpertOwners
from megapipe.layers.moe.sharding import MoESharding, expert_parameter
from megapipe.layers.parameter import LocalParameter, Sharding, new_parameter, spec_of
from megapipe.layers.specs import ParameterSpec


def sharding(size: int, index: int, sequence_parallel: bool = False) -> Sharding:
    tp = Axis(size=size, index=index, ranks=tuple(range(size)), group=None)
    return Sharding(tp, sequence_parallel, torch.float32)


@pytest.mark.parametrize("split_dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_regions_of_all_ranks_make_up_the_tensor(size: int, split_dim: int) -> None:
    full = torch.zeros(8, 12)
    for index in range(size):
        whole = ParameterSpec(name="w", shape=(8, 12), split_dim=split_dim, std=0.1)
        parameter = new_parameter(sharding(size, index), whole)
        spec = spec_of(parameter)
        assert parameter.device.type == "meta", "storage comes later"
        assert tuple(parameter.shape) == spec.sizes
        assert spec.numel == 96 // size
        rows, columns = (slice(a, a + n) for a, n in zip(spec.offsets, spec.sizes, strict=True))
        full[rows, columns] += 1
    assert full.eq(1).all()


def test_padding_reaches_beyond_the_shape() -> None:
    whole = ParameterSpec(name="w", shape=(11, 6), split_dim=0, multiple=8)
    spec = spec_of(new_parameter(sharding(4, 3), whole))
    assert (spec.shape, spec.offsets, spec.sizes) == ((11, 6), (24, 0), (8, 6))


def test_initial_values_are_the_same_in_every_layout() -> None:
    def values(size: int, index: int) -> torch.Tensor:
        parameter = new_parameter(
            sharding(size, index), ParameterSpec(name="w", shape=(8, 12), split_dim=0, std=0.1)
        )
        out = torch.empty(spec_of(parameter).sizes)
        spec_of(parameter).initialise(out, seed=3)
        return out

    whole = values(1, 0)
    assert torch.cat([values(4, index) for index in range(4)]).equal(whole)
    assert not whole.eq(whole[0, 0]).all()


def test_constant_initial_values() -> None:
    out = torch.empty(5)
    whole = ParameterSpec(name="norm", shape=(5,), fill=1.0)
    spec_of(new_parameter(sharding(2, 1), whole)).initialise(out, seed=3)
    assert out.eq(1).all()


@pytest.mark.parametrize(
    ("size", "sequence_parallel", "partial"), [(2, True, True), (2, False, False), (1, True, False)]
)
def test_sums_over_the_sequence_are_partial_only_where_it_is_split(
    size: int, sequence_parallel: bool, partial: bool
) -> None:
    whole = ParameterSpec(name="norm", shape=(4,), sequence_partial=True)
    spec = spec_of(new_parameter(sharding(size, 0, sequence_parallel), whole))
    assert spec.sequence_partial is spec.grad_is_partial is partial


OWNERS = [(0, 0, 1, 1, 2, 2), (2, 0, 1, 0, 2, 1), (1, 0, 0, 2, 2, 1)]
"""Owners of six experts: initial ones, ranks with strangers, neighbours on another rank."""


def of_experts(owners: tuple[int, ...], member: int) -> LocalParameter:
    """Make a tensor of six experts, [6, 4, 3], over three ranks and two halves of dimension 1."""
    ep = Axis(size=6, index=member, ranks=tuple(range(6)), group=None)
    dispatcher = AllToAllDispatcher(ep, etp=2)
    split = MoESharding(Axis.alone(), False, torch.float32, dispatcher=dispatcher)
    present = ExpertOwners(ExpertMap.even(6, 3), member // 2)
    spec = ParameterSpec(name="e", shape=(6, 4, 3), over_ep=True, inner_dim=1, std=0.1)
    found = spec_of(expert_parameter(split, spec, present))
    present.map = ExpertMap(owners, ((),) * 3)
    return found


@pytest.mark.parametrize("owners", OWNERS)
def test_experts_are_found_by_their_numbers(owners: tuple[int, ...]) -> None:
    """Any range of what a rank has is cut into regions that hold its values, and no others."""
    full = torch.arange(72.0).view(6, 4, 3)
    draw = random.Random(5)
    for member in range(6):
        spec = of_experts(owners, member)
        rank, half = divmod(member, 2)
        mine = [e for e, owner in enumerate(owners) if owner == rank]
        local = full[mine][:, 2 * half : 2 * half + 2]
        start, stop = sorted(draw.sample(range(13), 2))
        seen = []
        for position, part in flat_regions(spec.sizes, start, stop):
            values = local.flatten()[start:stop][position : position + part.numel].view(part.sizes)
            for inside, region in spec.global_regions(part):
                assert values[inside].equal(full[region.inside(whole(spec.shape))])
                seen += values[inside].flatten().tolist()
        assert sorted(seen) == sorted(local.flatten()[start:stop].tolist())


def test_initial_experts_are_those_of_their_numbers() -> None:
    def drawn(owners: tuple[int, ...]) -> torch.Tensor:
        found = torch.empty(6, 4, 3)
        for member in range(6):
            spec = of_experts(owners, member)
            out = torch.empty(spec.sizes)
            spec.initialise(out, seed=3)
            for inside, region in spec.global_regions():
                found[region.inside(whole(spec.shape))] = out[inside]
        return found

    first, *others = map(drawn, OWNERS)
    assert len(first.unique()) == 72
    assert all(each.equal(first) for each in others)
