"""Runs that save in the background: the same files, and nothing lost but the save under way."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megapipe import TrainStep
from megapipe.checkpoint import Checkpoint
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.shard import TORCH_DTYPES
from megapipe.cli import parse
from megapipe.distributed.mesh import Grid
from megapipe.layout.resolve import resolve
from megapipe.plan.memory import checkpoint_bytes, model_memory
from megapipe.testing import World, run_world
from tests.parity.jobs import Job, arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.stopped_runs import (
    DP,
    HALF,
    STEPS,
    TP,
    VOCABULARY,
    Play,
    assert_continues,
    assert_same_files,
    checkpoint,
    run,
)
from tests.parity.tiers import in_parts

CASES = {
    "dp2 pp2 zero 3": {**DP, "optimizer.zero": "3", "model.dtype": "bf16"},
    "tp2 pp2 validated after the fact": {**TP, "optimizer.post_validation": "true"},
    "dp2 pp2 offload": {**DP, "optimizer.offload": "host", "model.dtype": "bf16"},
    "dp2 pp2 zero 0": {**DP, "optimizer.zero": "0"},
    "dp2 pp2 disk": {**DP, "optimizer.offload": "disk", "optimizer.state_dtype": "bf16"},
}


@in_parts("case", CASES, full=["dp2 pp2 zero 3"])
def test_the_files_are_those_of_a_run_that_waits(case: str, tmp_path: Path) -> None:
    """A save in every step; and a run that ends while one is under way goes on bitwise."""
    given = {**CASES[case], "checkpoint.every": "1"}
    behind = {**given, "checkpoint.async_save": "true"}
    waits, goes_on, _, again = run(
        tmp_path,
        Play("waits", given),
        Play("behind", behind),
        Play("cut", behind, stop_after=HALF),
        Play("cut", behind),
    )
    for some, others in zip(goes_on, waits, strict=True):
        assert some["error"] is None
        assert some["steps"] == others["steps"]
    for step in range(1, STEPS + 1):
        assert_same_files(checkpoint(tmp_path, "behind", step), checkpoint(tmp_path, "waits", step))
    assert HALF - 1 <= again[0]["first_step"] <= HALF, "at most the save under way is lost"
    assert_continues(again, waits)


SIZES = {
    "bf16": {"model.dtype": "bf16"},
    "no masters": {
        "model.dtype": "bf16",
        "optimizer.master_weights": "none",
        "optimizer.zero": "0",
    },
    "sgd": {
        "optimizer.rule": "sgd",
        "optimizer.options.momentum": "0",
        "optimizer.options.nesterov": "false",
    },
    "biases of experts": {"model.moe.num_experts": "4", "model.moe.bias_update_rate": "0.1"},
    "adapters, fp16": {"model.dtype": "fp16", "lora.rank": "2", "checkpoint.load": "a/base",
                       "checkpoint.load_only": "weights", "optimizer.zero": "3"},
}  # fmt: skip


@pytest.mark.slow
def test_the_plan_knows_the_size(tmp_path: Path) -> None:
    """The planned size of a checkpoint is right to the byte, headers aside; so is a rank's largest
    part."""
    for given in SIZES.values():
        ranks = run_world(4, sizes, {**tiny(tmp_path), **given})
        for planned, own, whole, stored in ranks:
            assert whole == stored
            assert own <= planned
        assert max(planned for planned, *_ in ranks) == max(own for _, own, *_ in ranks)


def sizes(world: World, given: dict[str, str]) -> tuple[int, int, int, int]:
    """Return bytes of this rank's part, planned and real, and of a checkpoint, planned and real."""
    settings = {**given, "parallel.dp": "2", "parallel.pp": "2"}
    config, layout = resolve(parse(arguments(settings)).config, world.size, VOCABULARY)
    mesh = world.mesh(Grid(pp=layout.pp, dp=layout.dp, tp=layout.tp))
    step = TrainStep(config, layout, mesh)
    own = sum(piece.tensor.nbytes for piece in step.content(0).pieces)
    memory = model_memory(config, layout, mesh.pp.index)
    path = step.save(Path(given["run.folder"]), 0)
    entries = Checkpoint.open(path).manifest.entries.values()
    stored = sum(math.prod(e.shape) * TORCH_DTYPES[e.dtype].itemsize for e in entries)
    return memory.checkpoint_part, own, checkpoint_bytes(config, layout), stored


def notes(folder: Path, words: str) -> list[str]:
    records: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "runs/run/log.jsonl").read_text().splitlines()
    ]
    texts = [record["text"] for record in records if record["kind"] == "note"]
    return [text for text in texts if words in text]


@pytest.mark.slow
def test_old_checkpoints_go_and_the_last_one_is_there_at_the_end(tmp_path: Path) -> None:
    given = {**tiny(tmp_path), "train.steps": "9", "checkpoint.every": "2", "parallel.pp": "2"}
    given |= {
        "checkpoint.async_save": "true",
        "checkpoint.keep": "1",
        "checkpoint.export_every": "4",
    }
    outcome = run_forked(tmp_path, 2, *arguments(given))
    assert set(outcome.codes) == {0}, outcome.text
    names = [key.name for key in committed(tmp_path / "runs/run/checkpoints")]
    assert names[0] == "step-00000009"
    assert len(names) <= 2
    assert len(notes(tmp_path, "saved ")) == 5
    assert len(notes(tmp_path, "of which training waited")) == 4
    exported = {path.name for path in (tmp_path / "runs/run/exports").iterdir()}
    assert exported == {"step-00000004", "step-00000008"}


@pytest.mark.slow
def test_killed_and_gone_on(tmp_path: Path) -> None:
    """The kill is by -9, while saves are in flight in every step; losses are those of a whole
    run."""
    wanted = {"train.steps": "300", "checkpoint.every": "1", "checkpoint.keep": "1"}
    wanted |= {"checkpoint.async_save": "true", "parallel.dp": "2", "model.dropout": "0.1"}
    given = {**tiny(tmp_path), **wanted, "optimizer.schedule": "constant"}
    with Job(tmp_path) as job:
        job.launch(2, *arguments(given))
        job.kill_ranks("step-00000020")
        job.end()
    outcome = run_forked(tmp_path, 2, *arguments(given), "train.stop_after=40")
    assert set(outcome.codes) == {0}, outcome.text
    assert "resumed from" in outcome.text
    whole = {**given, "run.name": "whole", "checkpoint.every": "0"}
    outcome = run_forked(tmp_path, 2, *arguments(whole), "train.stop_after=40")
    assert set(outcome.codes) == {0}, outcome.text
    folders = [tmp_path / "runs" / name / "checkpoints/step-00000040" for name in ("run", "whole")]
    assert_same_files(*folders)
