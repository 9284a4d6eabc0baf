"""Formulas of plan/ against processes of worlds of any size, on torch's fake process group."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megapipe import TrainStep
from megapipe.distributed.collectives import all_gather, all_reduce
from megapipe.distributed.mesh import Grid
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.memory import model_memory
from megapipe.plan.units import Units
from tests.parity.group_order import check_all_are_made, groups_made
from tests.parity.tiers import in_parts, one_of

SHAPE = ("parallel.tp=2", "parallel.pp=2", "parallel.dp=4", "train.global_batch=32")
FEW_LAYERS = "model.layers=4"


@pytest.fixture(scope="module")
def scale() -> Iterator[Any]:
    """Import benchmarks/large_worlds.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("large_worlds")


@pytest.mark.parametrize(
    "keys",
    [
        ("optimizer.zero=0", "optimizer.reduce_dtype=bf16"),
        ("optimizer.zero=2", "parallel.sequence_parallel=true", "pipeline.schedule=zb_v"),
        ("optimizer.zero=3", "optimizer.shard_group_size=2", "pipeline.schedule=chimera"),
        ("optimizer.zero=3", "optimizer.weight_prefetch=0", "pipeline.schedule=zb_v"),
        ("optimizer.zero=2", "optimizer.shard_group_size=1", "model.tied_embeddings=false"),
        ("optimizer.zero=3", "parallel.dp=1", "train.global_batch=8"),
        (
            "parallel.sequence_parallel=true",
            "activations.policy=full",
            "activations.blocks_per_recompute=2",
        ),
        ("parallel.sequence_parallel=true", "activations.policy=selective"),
        ("activations.policy=stage", "kernels.loss_chunk_tokens=0", "model.dtype=fp64"),
        (
            "parallel.sequence_parallel=true",
            "pipeline.schedule=seq1f1b",
            "pipeline.sequence_slices=2",
        ),
        ("model.dtype=bf16", "model.positions=rotary", "model.norm=rmsnorm", "model.bias=false"),
        ("pipeline.schedule=chimera_backward_halving", "optimizer.zero=1"),
        ("optimizer.bucket_mib=1e-6", "parallel.sequence_parallel=true"),
        ("optimizer.bucket_mib=0.02", "optimizer.zero=3", "optimizer.shard_group_size=2"),
        ("optimizer.bucket_mib=0.02", "pipeline.schedule=chimera", "model.bias=false"),
    ],
    ids=" ".join,
)
def test_a_step_says_what_the_formulas_say(scale: Any, keys: tuple[str, ...]) -> None:
    config, layout = scale.configure(*scale.TOY, *SHAPE, FEW_LAYERS, *keys)
    for rank in (0, scale.grid_of(layout).world - 1):
        seen = scale.observed(config, layout, rank)
        assert seen == scale.expected(config, layout, rank)


@in_parts(
    "keys",
    [
        ("model.moe.shared_ffn_hidden=16", "optimizer.zero=2", "pipeline.schedule=zb_v"),
        ("model.moe.capacity_factor=1", "model.moe.drop_policy=score", "activations.policy=full"),
        ("model.moe.capacity_factor=1", "optimizer.zero=3",
         "activations.policy=stage", "model.moe.shared_ffn_hidden=16",
         "model.moe.shared_gate=sigmoid"),
        ("optimizer.zero=0", "pipeline.schedule=chimera", "model.moe.layer_freq=2"),
        ("parallel.ep=2", "parallel.etp=2", "optimizer.zero=3"),
        ("parallel.ep=4", "model.moe.shared_ffn_hidden=16", "activations.policy=full",
         "optimizer.zero=2"),
        ("pipeline.schedule=seq1f1b", "pipeline.sequence_slices=3", "model.moe.capacity_factor=1",
         "model.moe.drop_policy=position"),
    ],
    default=3,
    full=1,
    ids=" ".join,
)  # fmt: skip
def test_a_step_with_experts_says_so_too(scale: Any, keys: tuple[str, ...]) -> None:
    experts = ("model.moe.num_experts=4", "parallel.sequence_parallel=true")
    config, layout = scale.configure(*scale.TOY, *SHAPE, FEW_LAYERS, *experts, *keys)
    for rank in (0, 7):
        seen = scale.observed(config, layout, rank)
        assert seen == scale.expected(config, layout, rank)
        assert any(name.axis.startswith("edp") for name in seen)


@one_of(4)
def test_a_step_over_split_positions_says_so_too(scale: Any, some: slice) -> None:
    """No other axis has the ranks of cp; slices attend to the keys of earlier ones."""
    for keys in [*scale.CONTEXT_CASES.values()][some]:
        config, layout = scale.toy(512, *keys, "model.layers=8", cp=4)
        seen = scale.observed(config, layout, 511)
        assert seen == scale.expected(config, layout, 511), keys
        assert any(name.axis == "cp" for name in seen), keys


@pytest.mark.parametrize("zero", [1, 2])
def test_one_process_may_run_the_whole_pipeline(scale: Any, zero: int) -> None:
    keys = (*SHAPE, FEW_LAYERS, "pipeline.transport=in_process", f"optimizer.zero={zero}")
    config, layout = scale.configure(*scale.TOY, *keys)
    for rank in (0, 7):
        seen = scale.observed(config, layout, rank)
        assert seen == scale.expected(config, layout, rank)
        assert not any("pp" in name.axis for name in seen)


def test_the_largest_world(scale: Any) -> None:
    config, layout = scale.toy(16384, "model.layers=16", "train.global_batch=512")
    assert scale.grid_of(layout) == Grid(pp=16, dp=128, tp=8)
    seen = scale.observed(config, layout, 16383)
    assert seen == scale.expected(config, layout, 16383)
    assert seen["dp", "all_gather"].bytes > 128 * 8


def test_what_is_unlike_is_noticed(scale: Any) -> None:
    """A collective too many, one too few, and one of another size."""
    config, layout = scale.configure(*scale.TOY, *SHAPE, FEW_LAYERS)
    formula = scale.expected(config, layout, 0)
    train = TrainStep.train

    def one_more(step: TrainStep, *args: Any, **options: Any) -> Any:
        all_gather(torch.zeros(1), step.mesh.tp)
        return train(step, *args, **options)

    with mock.patch.object(TrainStep, "train", one_more):
        seen = scale.observed(config, layout, 0)
    assert scale.unlike(seen, formula) == [("tp", "all_gather")]

    for other in ("model.hidden=40", "optimizer.zero=0", "parallel.sequence_parallel=true"):
        changed = scale.configure(*scale.TOY, *SHAPE, FEW_LAYERS, other)
        assert scale.unlike(scale.observed(*changed, 0), formula), other


def test_a_collective_that_is_not_known_is_an_error(scale: Any) -> None:
    with scale.fake_world(Grid(dp=4), 1) as mesh, scale.Watch().counting():
        all_reduce(torch.zeros(3), mesh.dp)
        with pytest.raises(AssertionError, match="broadcast is not counted"):
            dist.broadcast(torch.zeros(3), 0)


def sizes_of_groups(scale: Any, world: int) -> list[int]:
    """Return the sizes of the process groups that the last process of a job makes."""
    dp = world // 4
    keys = ("parallel.tp=2", "parallel.pp=2", f"parallel.dp={dp}", f"train.global_batch={4 * dp}")
    config, layout = scale.configure(*scale.TOY, FEW_LAYERS, *keys)
    with scale.fake_world(scale.grid_of(layout), world - 1) as mesh:
        TrainStep(config, layout, mesh)
        return [len(made.members) for made in groups_made(world)]


def test_a_process_makes_as_many_groups_in_any_world(scale: Any) -> None:
    """Axes but for cp, of one rank; then two channels, then the holders of the tied embedding."""
    for world in (8, 16384):
        dp = world // 4
        assert sizes_of_groups(scale, world) == [2, dp, 2, 2, 2, 2 * dp]


EXPERTS = (
    "model.moe.num_experts=4",
    "model.moe.expert_ffn_hidden=16",
    "parallel.sequence_parallel=true",
)


@pytest.mark.full
@pytest.mark.parametrize(
    "keys",
    [
        ("parallel.cp=4", "context.ulysses=2", "optimizer.zero=3", "optimizer.shard_group_size=2"),
        (
            *("parallel.cp=4", "context.ulysses=2", "context.rank_order=context_first"),
            *("parallel.tp=2", "parallel.pp=3", "parallel.dp=1"),
        ),
        ("parallel.cp=2", "parallel.ep=4", *EXPERTS),
        ("parallel.cp=2", "parallel.pp=4", "pipeline.schedule=chimera"),
        (
            *("parallel.tp=2", "parallel.pp=4", "pipeline.schedule=dualpipe"),
            *("parallel.ep=2", "parallel.etp=2", *EXPERTS),
        ),
        (
            *(
                "parallel.dp=4",
                "parallel.tp=2",
                "parallel.ep=8",
                *EXPERTS,
                "model.moe.num_experts=8",
            ),
            *("experts.dispatch=hierarchical", "experts.ranks_per_node=4"),
        ),
        ("parallel.cp=2", "parallel.pp=3", "optimizer.post_validation=true"),
    ],
    ids=" ".join,
)
def test_groups_of_a_job_have_one_name_and_no_order_goes_in_circles(
    scale: Any, keys: tuple[str, ...]
) -> None:
    """Rings, heads and experts have groups, too; test_mesh_names draws pipelines at random."""
    common = ("parallel.dp=2", "parallel.pp=2", "train.global_batch=16", "model.layers=8")
    config, layout = scale.configure(*scale.TOY, *common, *keys)
    grid, made = scale.grid_of(layout), []
    for rank in range(grid.world):
        with scale.fake_world(grid, rank) as mesh:
            TrainStep(config, layout, mesh)
            made.append(groups_made(grid.world))
    check_all_are_made(made)


@in_parts(
    "keys",
    [
        ("optimizer.zero=0",),
        ("optimizer.zero=1", "model.dtype=bf16"),
        ("optimizer.zero=2", "model.bias=false"),
        ("optimizer.zero=3", "model.dtype=bf16"),
        ("optimizer.zero=1", "optimizer.rule=lion", "pipeline.schedule=zb_v"),
        ("optimizer.zero=2", "optimizer.rule=tests.parity.user_code_samples:Three"),
        ("optimizer.zero=1", "optimizer.shard_group_size=2", "model.tied_embeddings=false"),
        ("optimizer.zero=2", "optimizer.bucket_mib=0.02", "model.tied_embeddings=false"),
        ("optimizer.zero=3", "optimizer.bucket_mib=1e-6", "model.norm=rmsnorm"),
        ("pipeline.schedule=chimera", "parallel.sequence_parallel=true"),
    ],
    default=4,
    full=3,
    ids=" ".join,
)
def test_a_process_on_meta_allocates_what_the_formulas_say(
    scale: Any, keys: tuple[str, ...]
) -> None:
    # the kernels of meta are those of the CPU
    keys = (*SHAPE, FEW_LAYERS, "parallel.device=cpu", *keys)
    config, layout = scale.configure(*scale.TOY, *keys)
    for rank in (0, 15):
        index = scale.grid_of(layout).coordinates_of(rank).pp
        giant = scale.run_giant(config, layout, rank)
        memory = model_memory(config, layout, index)
        assert giant.lasting == memory.persistent
        activations = peak_activations(Units(config, layout), index).device
        assert memory.persistent + activations <= giant.peak
        assert giant.peak <= 1.05 * (memory.total + activations)
        assert giant.seen == scale.expected(config, layout, rank)


@pytest.mark.full
def test_what_an_update_is_undone_from(scale: Any) -> None:
    after, formula = [], []
    for chosen in ("false", "true"):
        keys = (*SHAPE, FEW_LAYERS, "model.dtype=bf16", f"optimizer.post_validation={chosen}")
        config, layout = scale.configure(*scale.TOY, *keys)
        after.append(scale.run_giant(config, layout, 0).after)
        formula.append(model_memory(config, layout, 0).transient)
    assert after[1] - after[0] == formula[1] - formula[0] > 0


def test_the_trillion_is_one(scale: Any) -> None:
    config, layout = scale.configure(*scale.GIANTS["1T"])
    per_rank = [model_memory(config, layout, rank).parameters // 2 for rank in range(layout.pp)]
    # both ends hold a copy of the tied embedding; tp ranks hold norms and row biases each
    assert sum(per_rank) * layout.tp == pytest.approx(1.008e12, rel=2e-3)
