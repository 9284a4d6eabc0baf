"""User-defined rules, learning-rate plans and data sets, against the built-in ones they imitate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.checkpoint import Checkpoint
from megapipe.config.data import DataConfig
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import load_tokenizer
from megapipe.errors import CheckpointError, DataError
from megapipe.testing import World, run_world
from tests.parity.jobs import tiny
from tests.parity.stopped_runs import (
    BASE,
    HALF,
    STEPS,
    Play,
    assert_continues,
    checkpoint,
    play_all,
    run,
)
from tests.parity.tiers import in_parts
from tests.parity.user_code_samples import TOKENS

OWN = "tests.parity.user_code_samples"
DP = {"parallel.dp": "2", "model.layers": "2", "optimizer.options.betas": "[0.9,0.95]"}
CHUNKS = {"pipeline.chunks": "2", "pipeline.schedule": "breadth_first"}
STORES: dict[str, dict[str, str]] = {
    "zero 0": {"optimizer.zero": "0"},
    "zero 1": {"optimizer.zero": "1"},
    "zero 2": {"optimizer.zero": "2", **CHUNKS},
    "zero 3": {"optimizer.zero": "3", **CHUNKS},
    "bf16": {"model.dtype": "bf16"},
    "host": {"model.dtype": "bf16", "optimizer.offload": "host"},
    "disk": {"optimizer.offload": "disk", "optimizer.state_dtype": "bf16",
             "optimizer.rounding": "nearest"},
    "post-validation": {"parallel.dp": "1", "parallel.pp": "2", "optimizer.post_validation": "true",
                        "optimizer.max_grad_norm": "0.05"},
}  # fmt: skip


def assert_alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Check that ranks computed the same losses, norms, learning rates, weights and states, bit for
    bit."""
    for a, b in zip(one, other, strict=True):
        assert (a["error"], b["error"]) == (None, None)
        assert a["steps"] == b["steps"]
        assert a["validation"] == b["validation"]
        for (*mine, x), (*theirs, y) in zip(a["copies"], b["copies"], strict=True):
            assert mine == theirs
            assert np.array_equal(x, y), mine
        for (name, start, _, x), (*theirs, _, y) in zip(a["state"], b["state"], strict=True):
            assert [name, start] == theirs
            assert np.array_equal(x, y), name


@in_parts("store", STORES, full=["zero 3"])
def test_a_rule_that_does_as_lion_gives_the_same_weights_and_resumes(
    store: str, tmp_path: Path
) -> None:
    given = {**DP, **STORES[store]}
    own = {**given, "optimizer.rule": f"{OWN}:Lion"}
    built_in, full, _, parts = run(
        tmp_path,
        Play("lion", {**given, "optimizer.rule": "lion"}),
        Play("full", own),
        Play("parts", own, stop_after=HALF),
        Play("parts", own),
        world=2,
    )
    assert_alike(full, built_in)
    assert parts[0]["first_step"] == HALF
    assert_continues(parts, full)
    saved, theirs = (Checkpoint.open(checkpoint(tmp_path, n, STEPS)) for n in ("parts", "lion"))
    assert {name.split("/")[0] for name in saved.names()} == {"model", "optimizer.momentum"}
    for name in saved.names():
        same = name.replace("optimizer.momentum", "optimizer.exp_avg")
        assert torch.equal(saved.read(name), theirs.read(same)), name
        assert saved.read(name).count_nonzero(), f"{name} was never changed"


@pytest.mark.full
def test_a_rule_by_other_arithmetic_is_near(tmp_path: Path) -> None:
    """In fp64, where torch's kernel for AdamW and plain operations differ in the last bits."""
    given = {**DP, "model.dtype": "fp64", "optimizer.zero": "2", **CHUNKS}
    own, built_in = run(
        tmp_path,
        Play("own", {**given, "optimizer.rule": f"{OWN}:AdamW"}),
        Play("adamw", given),
        world=2,
    )
    for a, b in zip(own, built_in, strict=True):
        assert (a["error"], b["error"]) == (None, None)
        for (*_, x), (*_, y) in zip(a["copies"], b["copies"], strict=True):
            assert abs(x - y).max() <= 1e-10 * max(abs(y).max(), 1e-2)


@pytest.mark.full
def test_a_rule_that_communicates_and_inherits(tmp_path: Path) -> None:
    given = {**DP, "parallel.dp": "1", "parallel.tp": "2"}
    own, built_in = run(
        tmp_path,
        Play("own", {**given, "optimizer.rule": f"{OWN}:LAMB"}),
        Play("lamb", {**given, "optimizer.rule": "lamb"}),
        world=2,
    )
    assert_alike(own, built_in)


@pytest.mark.full
def test_a_checkpoint_of_a_built_in_rule_is_not_one_of_the_user_s(tmp_path: Path) -> None:
    load = {"checkpoint.load": str(checkpoint(tmp_path, "lion", HALF))}
    _, other = run(
        tmp_path,
        Play("lion", {**DP, "optimizer.rule": "lion"}),
        Play("own", {**DP, "optimizer.rule": f"{OWN}:Lion", **load}),
        world=2,
    )
    for rank in other:
        assert rank["error"][0] is CheckpointError
        assert f"with optimizer.rule=lion, but the configuration has {OWN}:Lion" in rank["error"][1]


def test_a_plan_that_does_as_cosine_trains_alike(tmp_path: Path) -> None:
    given = {"model.layers": "1", "optimizer.min_lr": "1e-3"}
    own, built_in = run(
        tmp_path,
        Play("own", {**given, "optimizer.schedule": f"{OWN}:cosine"}),
        Play("cosine", given),
        world=1,
    )
    assert len({result.lr for result in own[0]["steps"].values()}) == STEPS
    assert_alike(own, built_in)


def with_tokens(
    world: World, folder: str, base: Mapping[str, str], plays: list[Play]
) -> list[dict[str, Any]]:
    os.environ[TOKENS] = folder
    return play_all(world, base, plays)


def run_with_tokens(folder: Path, *plays: Play, world: int) -> list[list[dict[str, Any]]]:
    """Do as `run`, where the user's data set finds the tokens of the corpus."""
    base = {**tiny(folder), **BASE}
    config = DataConfig(source=base["data.source"], cache=base["data.cache"])
    prepared = prepare(config, load_tokenizer("byte"), progress=False)
    labels = prepared.meta.validation.tokens - 1
    assert labels % int(base["train.sequence_length"]), "the last held-out sample is a short one"
    ranks = run_world(world, with_tokens, str(prepared.folder), base, list(plays))
    return [list(outcomes) for outcomes in zip(*ranks, strict=True)]


WINDOWS = {"data.source": f"{OWN}:Windows", "data.cache": "cache"}


@pytest.mark.parametrize("layout", [
    pytest.param({"parallel.dp": "2"}, marks=pytest.mark.slow),
    pytest.param({"parallel.pp": "2", "model.dropout": "0.1"}, marks=pytest.mark.full),
    pytest.param({"parallel.tp": "2", "data.eod_mask_loss": "true"}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_a_data_set_with_the_tokens_of_a_corpus_trains_alike_and_resumes(
    layout: dict[str, str], tmp_path: Path
) -> None:
    """To the last held-out token, which is in a sample that is masked in part."""
    given = {**layout, "train.validation_samples": "null"}
    own = {**given, **WINDOWS}
    corpus, full, _, parts = run_with_tokens(
        tmp_path,
        Play("corpus", given),
        Play("full", own),
        Play("parts", own, stop_after=HALF),
        Play("parts", own),
        world=2,
    )
    assert_alike(full, corpus)
    assert [rank["samples"] for rank in full] == [rank["samples"] for rank in corpus]
    assert_continues(parts, full)


@pytest.mark.full
def test_another_data_set_is_another_run(tmp_path: Path) -> None:
    one = {**WINDOWS, "model.layers": "1", "train.stop_after": "2"}
    begun, changed = run_with_tokens(
        tmp_path,
        Play("run", one),
        Play("run", {**one, "data.source": f"{OWN}:unlike", "train.stop_after": "3"}),
        world=1,
    )
    assert begun[0]["error"] is None
    kind, text = changed[0]["error"]
    assert kind is CheckpointError
    assert f"another run: corpus was {OWN}:Windows (" in text
    assert f") and is {OWN}:unlike (" in text


def test_ranks_with_other_samples_are_noticed(tmp_path: Path) -> None:
    unlike = {"parallel.dp": "2", "data.source": f"{OWN}:unlike", "data.cache": "cache"}
    (ranks,) = run(tmp_path, Play("run", unlike), world=2)
    for rank in ranks:
        assert rank["error"][0] is DataError
        assert "rank 1 has other samples than rank 0" in rank["error"][1]
