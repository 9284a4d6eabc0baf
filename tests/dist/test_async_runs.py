"""Whole runs without a flush, started as users start them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapipe.observe.sample_log import check, read_samples
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full

GIVEN = {
    "train.steps": "7",
    "train.validate_every": "3",
    "checkpoint.every": "2",
    "model.tied_embeddings": "false",
    "parallel.pp": "2",
    "log.sample_ids": "true",
}
STASH = {
    "pipeline.weight_versions": "stash",
    "optimizer.clip_scope": "stage",
    "train.microbatch": "4",
}
RUNS = {
    "stash": STASH,
    "double_buffer": {
        "pipeline.weight_versions": "double_buffer",
        "checkpoint.async_save": "true",
        "model.tied_embeddings": "true",
    },
    "latest": {**STASH, "pipeline.weight_versions": "latest"},
    "correct, at first synchronous": {
        **STASH,
        "pipeline.weight_versions": "correct",
        "pipeline.synchronous_steps": "3",
        "pipeline.lr_anneal_steps": "3",
    },
    "double_group": {
        "pipeline.weight_versions": "double_group",
        "pipeline.schedule": "two_group",
        "optimizer.max_grad_norm": "null",
        "model.layers": "4",
    },
}


def log(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs/run/log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> dict[tuple[str, int], float]:
    return {
        (each["kind"], each["step"]): each["loss"]
        for each in log(folder)
        if each["kind"] in ("step", "validation")
    }


def start(folder: Path, given: dict[str, str], code: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    outcome = run_forked(folder, 2, *arguments({**tiny(folder), **GIVEN, **given}))
    assert set(outcome.codes) == {code}, outcome.text
    return outcome.text


@in_parts("name", RUNS, full=["double_buffer", "correct, at first synchronous"])
def test_a_run_takes_each_sample_once_and_may_stop_in_between(name: str, tmp_path: Path) -> None:
    whole, parts, given = tmp_path / "whole", tmp_path / "parts", RUNS[name]
    start(whole, given)
    start(parts, {**given, "train.stop_after": "4"})
    told = start(parts, given)
    assert "resumed from" in told
    assert "repeats the forwards in flight" not in told
    assert "the pipeline restarts with" not in told
    assert losses(whole).items() <= losses(parts).items(), "which validates where it stops, too"
    for folder in (whole, parts):
        taken = read_samples(folder / "runs/run")
        assert [len(samples) for samples in taken.steps.values()] == [4] * 7
        assert check(taken)[0].startswith("steps 1 to 7 took samples 0 to 27 of the run")


def test_a_checkpoint_that_changes_the_run_is_told(tmp_path: Path) -> None:
    """One that is not due by its number, as where the run is asked to stop."""
    given, folder = RUNS["correct, at first synchronous"], tmp_path / "run"
    line = "pipeline.weight_versions=correct repeats the forwards in flight after it"
    assert line not in start(folder, {**given, "train.stop_after": "3"}), "nothing is in flight"
    told = start(folder, {**given, "train.stop_after": "5"})
    assert f"the checkpoint of step 5 is outside checkpoint.every=2: {line}" in told


def test_another_policy_goes_on_with_a_line(tmp_path: Path) -> None:
    start(tmp_path / "run", {**STASH, "train.stop_after": "4"})
    told = start(tmp_path / "run", {**STASH, "pipeline.weight_versions": "vertical"})
    assert "changed since: pipeline.weight_versions was stash and is vertical" in told
    assert "pipeline.weight_versions=vertical: the pipeline restarts with the weights" in told


def test_gradients_that_are_not_finite_end_the_run_before_their_update(tmp_path: Path) -> None:
    text = start(
        tmp_path / "run", {**STASH, "optimizer.lr": "1e30", "optimizer.max_grad_norm": "null"}, 6
    )
    assert "step 2: gradients of stage 1 are not finite" in text
