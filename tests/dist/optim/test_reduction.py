"""Sums of gradients over shard x replicate, in full and in narrow types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.distributed.mesh import Axis, Grid
from megapipe.layout.buckets import process_buckets
from megapipe.layout.resolve import resolve
from megapipe.optim.groups import BucketGroups
from megapipe.optim.reduction import Reduction
from megapipe.testing import World, run_world

N = 4096
SHARD_SIZES = [(0, None), (1, None), (1, 2), (1, 1)]
"""ZeRO stages and shard sizes on 4 replicas: replicate 4; shard 4; 2 x 2; replicate 4."""


def gradient(rank: int) -> Tensor:
    """Return a gradient [N], fp32, of all magnitudes."""
    generator = torch.Generator().manual_seed(rank)
    draw = torch.randn(N, generator=generator)
    return draw * torch.logspace(-8, 3, N)


def reduce(world: World) -> list[tuple[int, int, list[Tensor]]]:
    """Return, for each sharding, this rank's shard, the number of shards, and its sums in fp32 and
    bf16."""
    mesh = world.mesh(Grid(dp=4))
    results = []
    for zero, size in SHARD_SIZES:
        optimizer = {"zero": zero, "shard_group_size": size}
        tree = {"parallel": {"dp": 4}, "optimizer": optimizer, "model": {"tied_embeddings": False}}
        config, layout = resolve(Config.model_validate(tree), None, 256)
        (bucket,) = process_buckets(config, layout, 0)
        groups = BucketGroups(mesh)
        shard, replicate = groups.axis(bucket.shard), groups.axis(bucket.replicate)
        sums = []
        for dtype in (None, torch.float32, torch.bfloat16):
            grads = gradient(world.rank)
            reduction = Reduction(grads, shard, replicate, dtype)
            sums.append(reduction.wait().clone())
        results.append((shard.index, shard.size, sums))
    return results


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_world(4, reduce)


def whole(ranks: list[Any], case: int, kind: int) -> Tensor:
    """Join the shards to [N]; check that all ranks with a shard have the same one."""
    slices: dict[int, Tensor] = {}
    for rank in ranks:
        index, size, sums = rank[case]
        assert sums[kind].shape == (N // size,)
        assert sums[kind].dtype == torch.float32
        assert slices.setdefault(index, sums[kind]).equal(sums[kind]), "bitwise alike"
    return torch.cat([slices[index] for index in sorted(slices)])


CASES = range(len(SHARD_SIZES))


@pytest.mark.parametrize("case", CASES)
def test_every_replica_s_gradient_is_in_the_sum_once(case: int, ranks: list[Any]) -> None:
    exact = sum(gradient(rank).double() for rank in range(4))
    size = sum(gradient(rank).double().abs() for rank in range(4))
    for kind in (0, 1):
        error = (whole(ranks, case, kind).double() - exact).abs()
        assert (error <= 3 * 2**-24 * size).all(), "three additions, each to the nearest"
    assert whole(ranks, case, 0).equal(whole(ranks, case, 1)), "fp32 is what it is anyway"


def narrow(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def plain_sum(parts: list[Tensor]) -> Tensor:
    """Sum one after the other, in fp32."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def emulated(case: int, sent_as: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what the reduction must be, to the last bit, if values are sent in some type."""
    sent = [sent_as(gradient(rank)) for rank in range(4)]
    zero, size = SHARD_SIZES[case]
    if zero == 0 or size == 1:
        return sent_as(plain_sum(sent))  # the sum travels, too
    if size is None:
        return plain_sum(sent)
    inner = [plain_sum(sent[:2]), plain_sum(sent[2:])]
    return sent_as(plain_sum([sent_as(each) for each in inner]))


@pytest.mark.parametrize("case", CASES)
def test_replicas_are_added_one_after_the_other(case: int, ranks: list[Any]) -> None:
    """So a sum has the same bits however it is shared out."""
    assert whole(ranks, case, 0).equal(emulated(case, lambda x: x))


@pytest.mark.parametrize("case", CASES)
def test_what_travels_in_bf16_is_added_in_fp32(case: int, ranks: list[Any]) -> None:
    assert whole(ranks, case, 2).equal(emulated(case, narrow))


@pytest.mark.parametrize(("case", "roundings"), [(0, 2), (1, 1), (2, 3), (3, 2)])
def test_the_error_is_that_of_the_roundings(case: int, roundings: int, ranks: list[Any]) -> None:
    """Each is to the nearest of 8 bits: at most 2^-8 of what is rounded."""
    exact = sum(gradient(rank).double() for rank in range(4))
    size = sum(gradient(rank).double().abs() for rank in range(4))
    error = (whole(ranks, case, 2).double() - exact).abs()
    assert (error <= 1.01 * roundings * 2**-8 * size).all()
    in_bf16 = sum((gradient(rank).bfloat16() for rank in range(4)), torch.zeros(N).bfloat16())
    added_narrow = (in_bf16.double() - exact).abs()
    typical = error.sum() / size.sum()
    assert typical > 2**-13, "something was rounded"
    if roundings == 1:
        assert error.sum() < 0.7 * added_narrow.sum(), "better than adding in bf16"


def test_alone_nothing_travels_and_nothing_is_rounded() -> None:
    alone = Axis.alone()
    for dtype in (None, torch.bfloat16):
        grads = gradient(0)
        assert Reduction(grads, alone, alone, dtype).wait() is grads
