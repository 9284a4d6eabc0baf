"""Values that are not finite on one rank alone stop all of them, before they are saved."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.errors import NumericError
from megapipe.optim.buffers import ParamRange
from megapipe.optim.shard import Shard
from megapipe.testing import World, run_world
from tests.parity.ranks import Case, Rows, configure

pytestmark = pytest.mark.full

CASE = Case(tp=2, m=2, dtype="fp32", layers=1, sequence_parallel=True)
NORM = "layers.0.mlp_norm.weight"


def place(step: TrainStep, name: str) -> tuple[Shard, ParamRange]:
    """Find the shard that has a parameter, and its range there."""
    return next(
        (shard, entry)
        for shard in step.optimizer.shards
        for entry in shard.bucket.entries
        if entry.spec.name == name
    )


def poisoned(world: World, case: Case, what: str, folder: str) -> list[str]:
    """Return the errors of a step, of settling and of saving on this rank, after the last tp rank
    was given one value that is not finite: in the gradient of a norm, or in its `what`."""
    config, layout = configure(case)
    mesh = world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp))
    step, rows = TrainStep(config, layout, mesh), Rows(case)
    step.train(0, rows)
    step.settle()
    shard, entry = place(step, NORM)
    at = entry.start - shard.start
    if mesh.tp.index == mesh.tp.size - 1 and shard.start <= entry.start < shard.stop:
        if what == "gradient":
            finish = shard.finish_reduce

            def spoil() -> None:
                finish()
                shard.grad[at] = math.nan

            shard.finish_reduce = spoil  # type: ignore[method-assign]
        else:
            shard.store.read(what, at, at + 1).fill_(math.inf)
    seen = []
    for act in (
        lambda: step.train(1, rows, settle=True),
        lambda: (step.settle(), step.save(folder, 2)),
    ):
        try:
            act()
            seen.append("")
        except NumericError as error:
            seen.append(str(error))
    return seen


def all_poisoned(world: World, folder: str) -> dict[str, list[str]]:
    """Run one case after another."""
    wide = replace(CASE, dp=2, zero=0, tp=1, sequence_parallel=False)
    cases = {
        "gradient": (CASE, "gradient"),
        "exp_avg_sq": (CASE, "exp_avg_sq"),
        "narrow": (replace(CASE, dtype="bf16"), "exp_avg_sq"),
        "copies": (wide, "gradient"),
    }
    return {name: poisoned(world, *given, f"{folder}/{name}") for name, given in cases.items()}


def test_one_rank_alone_is_enough(tmp_path: Path) -> None:
    """One rank is enough for values that all tp ranks hold and only the first counts in the norm,
    and for states, which no norm shows: an infinite exp_avg_sq leaves the weight where it is for
    ever."""
    ranks = run_world(2, all_poisoned, str(tmp_path))
    for seen in ranks:
        for first in (seen["gradient"][0], seen["copies"][0]):
            assert first.startswith("step 2: loss ")
            assert "gradients of stages 0" in first
        assert f"not finite, in {NORM} on rank 1; " in seen["gradient"][0]
        assert f"not finite, in 2 tensors on ranks 0-1, the first is {NORM}; " in seen["copies"][0]
        for both in (seen["exp_avg_sq"], seen["narrow"]):
            for error in both:
                assert error.startswith(
                    "update 2 made weights or optimizer states that are not finite, in "
                    f"exp_avg_sq of {NORM} on rank 1, and is not saved"
                )
    assert not any((tmp_path / name).exists() for name in ("exp_avg_sq", "narrow"))
