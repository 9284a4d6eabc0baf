"""Runs on unequal links and devices: other orders of pipeline ranks, and the doctor's link test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megapipe import TrainStep
from megapipe.cli import parse
from megapipe.config.plan_file import plan_words
from megapipe.distributed.mesh import Grid
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS
from megapipe.testing import World, run_world

ROOT = Path(__file__).parents[2]
KEYS = (
    *("model.layers=5", "model.hidden=32", "model.heads=2", "train.sequence_length=16"),
    *("train.global_batch=4", "train.microbatch=1", "parallel.pp=3", "optimizer.warmup_steps=0"),
)
VOCABULARY = 64
ORDER = "pipeline.rank_order=[2,0,1]"


def losses(world: World, *keys: str) -> list[tuple[float, float]]:
    """Train three steps; return losses and gradient norms."""
    config, layout = resolve(parse([*KEYS, *keys]).config, world.size, VOCABULARY, measure=BY_UNITS)
    step = TrainStep(config, layout, world.mesh(Grid(pp=world.size)))

    def rows(indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = (torch.tensor(indices)[:, None] * 7 + torch.arange(17)) % VOCABULARY
        return tokens[:, :-1], tokens[:, 1:], torch.ones(len(indices), 16, dtype=torch.bool)

    found = []
    for number in range(3):
        (result,) = step.train(number, rows)
        found.append((result.loss, result.grad_norm))
    return found


@pytest.mark.parametrize(
    "keys",
    [
        ["model.tied_embeddings=true"],
        ["pipeline.schedule=interleaved_1f1b", "pipeline.chunks=2", "train.global_batch=6"],
    ],
    ids=["tied", "interleaved"],
)
def test_the_order_of_ranks_changes_no_bit(keys: list[str]) -> None:
    """The ranks hold other stages, with the same layers, and compute the same."""
    usual = run_world(3, losses, *keys)
    moved = run_world(3, losses, *keys, ORDER)
    assert usual == moved
    assert len({loss for loss, _ in usual[0]}) == 3


def test_a_rank_at_half_speed_trains_fewer_layers() -> None:
    slow = run_world(3, losses, "plan.rank_speeds=[1,1,0.5]")
    usual = run_world(3, losses)
    assert slow[0][0] == pytest.approx(usual[0][0], rel=1e-5)
    _, layout = resolve(
        parse([*KEYS, "plan.rank_speeds=[1,1,0.5]"]).config, 3, VOCABULARY, measure=BY_UNITS
    )
    assert len(layout.stage_layers[2].layers) < len(layout.stage_layers[0].layers)


def test_the_doctor_measures_the_links_of_a_job(tmp_path: Path) -> None:
    file = tmp_path / "links.yaml"
    launch = [sys.executable, "-m", "megapipe.launch", "--nproc", "2", "-m", "megapipe"]
    done = subprocess.run(
        [*launch, "doctor", "--links", str(file)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"megapipe plan --links {file}" in done.stdout
    plan = parse(plan_words(file)).config.plan
    assert plan.intra_node_gb_s is not None
    assert plan.intra_node_gb_s > 0.001
    assert 1 < plan.link_latency_us < 1e6
