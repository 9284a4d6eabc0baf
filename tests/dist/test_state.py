"""Wherever and in whatever type state is kept, layouts agree as they do with fp32 in place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.writer import Meta, save
from megapipe.config.config import OptimizerConfig
from megapipe.distributed.mesh import Grid
from megapipe.testing import World, run_world
from megapipe.train import checkpoint_io
from tests.parity.ranks import Case, Rows, configure, local_copies
from tests.parity.tiers import in_parts

STEPS = 3
CASE = Case(dp=2, tp=2, m=2, layers=1, sequence_parallel=True, dtype="bf16", clip=None)
"""Case in which norms and the biases of row-parallel layers are held, and must be rounded alike, by
both tp ranks. Everything else is rounded by the owner of a shard, or, with ZeRO-0, by both
replicas."""


def new_step(world: World, case: Case, folder: Path, settings: dict[str, Any]) -> TrainStep:
    config, layout = configure(case)
    optimizer = OptimizerConfig.model_validate(
        config.optimizer.model_dump() | {"offload_folder": str(folder)} | settings
    )
    config = config.model_copy(update={"optimizer": optimizer})
    return TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))


def trained(world: World, case: Case, folder: Path, settings: dict[str, Any]) -> list[Any]:
    """Return this rank's weights, and its states, after some steps."""
    step = new_step(world, case, folder, settings)
    rows = Rows(case)
    for i in range(STEPS):
        step.train(i, rows)
    return outcome(step)


def outcome(step: TrainStep) -> list[Any]:
    states: list[Tensor] = []
    for own in step.optimizer.own_slices():
        states += [values.double() for values in own.values.values()]
    return [*local_copies(step), ("states", None, torch.cat(states).numpy())]


def many(world: World, runs: list[tuple[Case, dict[str, Any]]], folder: Path) -> list[list[Any]]:
    return [trained(world, case, folder, settings) for case, settings in runs]


def assert_equal(one: list[Any], other: list[Any], *, states: bool = True) -> None:
    assert len(one) == len(other) > 3
    for (name, region, a), (same, place, b) in zip(one, other, strict=True):
        assert (name, region) == (same, place)
        if states or name != "states":
            assert (a == b).all(), name


NARROW = {"state_dtype": "bf16", "master_weights": "none"}


@pytest.mark.full
def test_where_state_is_kept_changes_no_bit(tmp_path: Path) -> None:
    """In place, in host memory, on a disk: fp32 and bf16 states."""
    for settings in ({}, NARROW):
        runs = [(CASE, {**settings, "offload": place}) for place in ("none", "host", "disk")]
        for results in run_world(4, many, runs, tmp_path):
            for other in results[1:]:
                assert_equal(results[0], other)


def test_rounding_at_random_does_not_depend_on_who_owns_a_slice(tmp_path: Path) -> None:
    """ZeRO-0 and ZeRO-1 are equal bitwise, and all copies of a weight are."""
    runs = [(replace(CASE, zero=zero), NARROW) for zero in (0, 1)]
    ranks = run_world(4, many, runs, tmp_path)
    for replicated, sharded in ranks:
        assert_equal(replicated, sharded, states=False)
    seen: dict[Any, Any] = {}
    shared = 0
    for rank in ranks:
        for name, region, values in rank[1]:
            if region is None:
                continue
            shared += (name, region) in seen
            assert (seen.setdefault((name, region), values) == values).all(), name
    assert shared


def interrupted(world: World, folder: Path, settings: dict[str, Any]) -> tuple[list[Any], ...]:
    """Train one run to its end, and one that begins with its checkpoint of the second step."""
    rows = Rows(CASE)
    first = new_step(world, CASE, folder, settings)
    for i in range(STEPS):
        if i == 2:
            meta = Meta("run", {}, {}, {})
            path = save(
                folder / "checkpoints",
                step=2,
                pieces=checkpoint_io.pieces(first.optimizer),
                meta=replace(meta, coordinates={"samples": first.samples(i)}),
                group=first.mesh,
            )
        first.train(i, rows)
    ending = outcome(first)
    again = new_step(world, CASE, folder, settings)
    again.state.take_over(Checkpoint.open(path))
    again.train(2, rows)
    return ending, outcome(again)


@in_parts("place", ["none", "disk"], default=["disk"])
def test_a_resumed_run_rounds_as_the_uninterrupted_one(place: str, tmp_path: Path) -> None:
    for ending, resumed in run_world(4, interrupted, tmp_path, {**NARROW, "offload": place}):
        assert_equal(ending, resumed)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_narrow_state_is_near_the_wide_one_and_not_it(rounding: str, tmp_path: Path) -> None:
    case = replace(CASE, dp=1, tp=1, sequence_parallel=False, dtype="fp32")
    runs = [(case, {}), (case, {"state_dtype": "bf16", "rounding": rounding})]
    (results,) = run_world(1, many, runs, tmp_path)
    for (name, region, wide), (_, _, narrow) in zip(*results, strict=True):
        if region is not None:
            assert abs(narrow - wide).max() < 3e-5, name  # of lr x steps = 3e-3
    assert any((a[2] != b[2]).any() for a, b in zip(*results, strict=True))
