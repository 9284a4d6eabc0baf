"""A small fp16 model: its gradients are those of plain fp16, it skips what overflows, it trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.layout.resolve import resolve
from megapipe.optim.loss_scaler import FIRST, LARGEST
from megapipe.testing import World, WorldError, run_world
from tests.parity.ranks import Case, Rows, configure

STEPS = 30
CASE = Case(dtype="fp16", m=2, layers=2)
SPLIT = replace(CASE, m=4, batch=1, tp=2, pp=2, sequence_parallel=True, schedule="zb_h1")
"""The same samples in another layout."""


@dataclass
class Run:
    losses: list[float]
    scales: list[float]
    norms: list[float]
    changed: list[bool]
    """Whether a step changed the weights."""
    count: int
    """Updates that the optimizer made."""


class OneBatch(Rows):
    """The batch of the first step, over and over, so that the loss must fall."""

    def __call__(self, indices: Any) -> Any:
        return super().__call__([i % self.size for i in indices])


def trained(world: World, case: Case, optimizer: dict[str, Any], scale: float | None = None) -> Run:
    """Train STEPS steps; `scale` is the initial loss scale, if it is not the usual one."""
    config, _ = configure(case)
    settings = config.model_dump()
    settings["train"]["steps"] = STEPS
    settings["optimizer"] |= {"lr": 3e-3, "min_lr": 3e-3} | optimizer
    config, layout = resolve(Config.model_validate(settings), case.world, case.vocab)
    step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp, dp=case.dp, tp=case.tp)))
    step.scaler.scale = scale or step.scaler.scale
    run = Run([], [], [], [], 0)
    for i in range(STEPS):
        before = [shard.weights.clone() for shard in step.optimizer.shards]
        (result,) = step.train(i, OneBatch(case))
        after = [shard.weights for shard in step.optimizer.shards]
        run.losses.append(result.loss)
        run.norms.append(result.grad_norm)
        run.scales.append(result.loss_scale)
        run.changed.append(any(not a.equal(b) for a, b in zip(after, before, strict=True)))
    assert all(weights.dtype == TORCH_DTYPES[case.dtype] for weights in after)
    run.count = step.optimizer.count
    return run


@pytest.mark.full
def test_it_trains_as_fp32_does_in_any_layout() -> None:
    (plain,) = run_world(1, trained, replace(CASE, dtype="fp32"), {})
    assert plain.losses[-1] < 0.7 * plain.losses[0]
    for case in (CASE, SPLIT):
        for half in run_world(case.world, trained, case, {}):
            assert half.losses == pytest.approx(plain.losses, rel=2e-3)
            assert half.norms[0] == pytest.approx(plain.norms[0], rel=2e-3), "without the scale"
            assert all(half.changed)
            assert set(half.scales) == {FIRST}


def test_a_gradient_that_overflows_skips_the_step() -> None:
    """At 2^24 fp16 gradients overflow; 4 good steps double the scale, until they do again."""
    (run,) = run_world(1, trained, CASE, {"loss_scale_window": 4}, LARGEST)
    assert not run.changed[0]
    assert run.count == sum(run.changed), "a skipped step is no step of Adam"
    for i, (scale, then) in enumerate(pairwise(run.scales)):
        if not run.changed[i]:
            assert then == scale / 2
            assert not math.isfinite(run.norms[i])
        else:
            assert then in (scale, 2 * scale)
            assert math.isfinite(run.norms[i])
    assert any(then == 2 * scale for scale, then in pairwise(run.scales))
    assert run.losses[-1] < 0.9 * run.losses[0]


def goes_on(world: World, folder: Path) -> list[Any]:
    """Return results, states and weights of a run after its third step, and of one that resumes
    from what it saved there. The first gradients overflow."""
    config, _ = configure(replace(CASE, steps=8))
    settings = config.model_dump()
    settings["optimizer"]["loss_scale_window"] = 3
    config, layout = resolve(Config.model_validate(settings), 1, CASE.vocab)
    whole, part = (TrainStep(config, layout, world.mesh(Grid())) for _ in range(2))
    whole.scaler.scale, rows = LARGEST / 16, OneBatch(CASE)
    skipped = [whole.train(i, rows)[0].skipped for i in range(3)]
    whole.settle()
    whole.save(folder, 3)
    part.load(folder)
    found: list[Any] = [skipped]
    for step in (whole, part):
        results = [step.train(i, rows)[0] for i in range(3, 8)]
        step.settle()
        seen = [(r.loss, str(r.grad_norm), r.lr, r.loss_scale) for r in results]  # nan is nan
        weights = [own.values["model"].tolist() for own in step.optimizer.own_slices()]
        found.append((seen, step.optimizer.count, step.scaler.state(), weights))
    return found


def test_a_run_goes_on_with_its_loss_scale_and_its_updates(tmp_path: Path) -> None:
    """Updates are fewer than steps, and the next doubling comes as long after the last one."""
    ((skipped, whole, part),) = run_world(1, goes_on, tmp_path)
    assert any(skipped)
    assert not all(skipped)
    assert part == whole
    assert whole[1] < 8
    assert len({scale for *_, scale in whole[0]}) > 1


@pytest.mark.full
def test_a_fixed_scale_that_overflows_is_an_error() -> None:
    with pytest.raises(WorldError, match=r"BadStep.*not finite"):
        run_world(1, trained, CASE, {"loss_scale": LARGEST})
