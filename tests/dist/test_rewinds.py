"""Runs with anomalies: they stop, skip, or rewind and skip samples."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.checkpoint import Checkpoint
from megapipe.observe.sample_log import check, read_samples
from megapipe.train.anomaly_detection import BadStep
from tests.parity.poison import Poison
from tests.parity.stopped_runs import DP, STEPS, TP, Play, assert_same_files, checkpoint, run
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full

REWIND = {"health.non_finite": "rewind", "checkpoint.every": "2", "log.sample_ids": "true"}
SPIKES = {"health.spike_factor": "40", "health.spike_window": "4"}
SKIP = {"health.non_finite": "skip"}
BAD = (43, 44)
"""Range of a sample of step 6, which takes those from 40 to 47."""
LEFT_OUT = {"health.skip_samples": "[[40,48]]"}


def notes(folder: Path, name: str) -> list[str]:
    lines = (folder / "runs" / name / "log.jsonl").read_text().splitlines()
    return [record["text"] for record in map(json.loads, lines) if record["kind"] == "note"]


def assert_alike(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    """Check that every step, the weights and the states are the same, to the bit."""
    for mine, theirs in zip(one, other, strict=True):
        assert mine["error"] is theirs["error"] is None
        assert mine["steps"] == theirs["steps"]
        assert mine["validation"] == theirs["validation"]
        for key in ("copies", "state"):
            for (*name, x), (*same, y) in zip(mine[key], theirs[key], strict=True):
                assert name == same
                assert np.array_equal(x, y), name


CASES: dict[str, tuple[Mapping[str, str], Poison]] = {
    "a tensor-parallel rank": (TP, Poison("gradient", 3, *BAD)),
    "the loss of a tensor-parallel rank": (TP, Poison("loss", 3, *BAD)),
    "a micro-batch": (DP, Poison("loss", 2, *BAD)),
    "states": ({**DP, "optimizer.zero": "3"}, Poison("state", 1, *BAD, factor=math.inf)),
    "post-validation": ({**DP, "optimizer.post_validation": "true"}, Poison("gradient", 0, *BAD)),
    "fp16 and background": (
        {**DP, "model.dtype": "fp16", "checkpoint.async_save": "true"},
        Poison("loss", 3, *BAD),
    ),
    "a spike of the loss": ({**DP, **SPIKES}, Poison("loss", 3, *BAD, factor=1e4)),
    "a spike of the norm": (
        {**DP, **SPIKES, "optimizer.post_validation": "true", "optimizer.max_grad_norm": "null"},
        Poison("gradient", 1, *BAD, factor=1e9),
    ),
}


@in_parts("case", CASES, full=["a spike of the norm"])
def test_a_run_that_goes_back_is_the_one_without_those_samples(case: str, tmp_path: Path) -> None:
    """Bitwise, also where it is stopped after that and goes on."""
    given, poison = CASES[case]
    settings = {**given, **REWIND}
    waits = {**settings, "checkpoint.async_save": "false"}  # or what is cut may lack its last save
    back, _, rest, anew = run(
        tmp_path,
        Play("back", settings, callbacks=(poison,)),
        Play("parts", waits, stop_after=7, callbacks=(poison,)),
        Play("parts", waits),
        Play("anew", {**given, **REWIND, **LEFT_OUT}),
    )
    assert_alike(back, anew)
    for name in ("back", "parts"):
        (line,) = [note for note in notes(tmp_path, name) if "rewound" in note]
        assert "to step 4 (" in line
        assert "samples 40 to 47 are skipped" in line
        assert line.endswith("health.skip_samples=[[40,48]]")
        taken, skipped_samples, *_ = check(read_samples(tmp_path / "runs" / name))
        assert taken == "steps 1 to 8 took samples 0 to 71 of the run, each once and in order"
        assert skipped_samples == "skipped: 8 samples, 40 to 47"
    assert rest[0]["first_step"] == 6
    for mine, theirs in zip(rest, anew, strict=True):
        assert all(result == theirs["steps"][step] for step, result in mine["steps"].items())
    for name in ("back", "parts"):
        mine, same = (checkpoint(tmp_path, each, STEPS) for each in (name, "anew"))
        assert_same_files(mine, same)
        assert (
            Checkpoint.open(mine).manifest.coordinates == Checkpoint.open(same).manifest.coordinates
        )


@pytest.mark.parametrize(
    ("given", "poison"),
    [
        pytest.param(TP, Poison("gradient", 2, *BAD), marks=pytest.mark.slow),
        pytest.param(TP, Poison("loss", 3, *BAD), marks=pytest.mark.slow),
        pytest.param({**DP, "model.dropout": "0"}, Poison("loss", 2, *BAD), marks=pytest.mark.slow),
        (
            {**DP, "model.dropout": "0", "optimizer.post_validation": "true"},
            Poison("gradient", 1, *BAD),
        ),
    ],
)
def test_a_step_that_is_skipped_leaves_no_trace(
    given: Mapping[str, str], poison: Poison, tmp_path: Path
) -> None:
    """But that it counts: weights are those of a run that lacks it, at a rate that is constant."""
    settings = {**given, "optimizer.schedule": "constant"}
    skipped, short = run(
        tmp_path,
        Play("skipped", {**settings, **SKIP}, callbacks=(poison,)),
        Play("short", {**settings, **LEFT_OUT, "train.steps": str(STEPS - 1)}),
    )
    for rank in skipped:
        assert rank["error"] is None
        assert [n for n, step in rank["steps"].items() if step.skipped] == [6]
    for key in ("copies", "state"):
        for mine, theirs in zip(skipped, short, strict=True):
            for (*_, x), (*_, y) in zip(mine[key], theirs[key], strict=True):
                assert np.array_equal(x, y)
    (line,) = [note for note in notes(tmp_path, "skipped") if "is skipped" in note]
    assert line.startswith("step 6 is skipped: loss ")
    assert "not finite" in line
    saved = Checkpoint.open(checkpoint(tmp_path, "skipped", STEPS)).manifest.coordinates
    assert (saved["updates"], saved["samples"]) == (STEPS - 1, 8 * STEPS)


def test_what_cannot_be_mended_ends_a_run_on_all_ranks(tmp_path: Path) -> None:
    always = Poison("gradient", 1, 40, 10**6)
    states = Poison("state", 0, *BAD, factor=math.inf)
    two = {"parallel.pp": "2"}
    loss = Poison("loss", 1, *BAD)  # not the tp rank whose loss counts
    plays = (
        Play("loss", {"parallel.tp": "2"}, callbacks=(loss,)),
        Play("stop", two, callbacks=(always,)),
        Play("skip", {**two, **SKIP, "health.max_consecutive_skips": "2"}, callbacks=(always,)),
        Play("states", {**two, **SKIP}, callbacks=(states,)),
        Play("none", {**two, **REWIND, "checkpoint.every": "0"}, callbacks=(always,)),
        Play("often", {**two, **REWIND, "health.max_rewinds": "2"}, callbacks=(always,)),
    )
    for this, ranks in zip(plays, run(tmp_path, *plays, world=2), strict=True):
        kinds, texts = zip(*(rank["error"] for rank in ranks), strict=True)
        assert set(kinds) == {BadStep}
        assert BadStep.exit_code == 6
        (text,) = set(texts)
        expected = {
            "loss": "step 6: loss nan, gradient norm",
            "stop": "replayed with the same result: the cause is in data or weights, not in a "
            "device; lower optimizer.lr or resume from an earlier checkpoint",
            "skip": "step 8: loss",
            "states": "update 6 made weights or optimizer states that are not finite",
            "none": "there is no checkpoint to rewind to; lower optimizer.lr",
            "often": "step-00000004 2 times, and health.max_rewinds=2; lower optimizer.lr",
        }
        assert expected[this.name] in text, text
    skipped = [note for note in notes(tmp_path, "skip") if "is skipped" in note]
    assert [note.split(":")[0] for note in skipped] == ["step 6 is skipped", "step 7 is skipped"]
    assert sum("rewound" in note for note in notes(tmp_path, "often")) == 2


def test_a_batch_that_grows_and_a_mixture_go_on_with_later_samples(tmp_path: Path) -> None:
    """Batches are those of the steps, whatever is left out, and sources those of the numbers."""
    (tmp_path / "more.txt").write_text("more and more " * 2000)
    given = {
        "parallel.pp": "2",
        "train.batch_ramp": "[4, 4, 16]",
        "data.source": "stdlib",
        "data.mixture.a.source": str(tmp_path / "more.txt"),
        "data.mixture.a.weight": "[[0, 1], [6, 3]]",
        "data.mixture.b.source": str(tmp_path / "corpus.txt"),
        "data.mixture.b.weight": "2",
        **REWIND,
    }
    poison = Poison("loss", 1, 20, 21)
    back, anew = run(
        tmp_path,
        Play("back", given, callbacks=(poison,)),
        Play("anew", {**given, "health.skip_samples": "[[16, 24]]"}),
        world=2,
    )
    assert_alike(back, anew)
    (line,) = [note for note in notes(tmp_path, "back") if "rewound" in note]
    assert "to step 4 (" in line
    assert "samples 16 to 23 are skipped" in line
    for name in ("back", "anew"):
        log = (tmp_path / "runs" / name / "log.jsonl").read_text().splitlines()
        last = [record for record in map(json.loads, log) if record["kind"] == "step"][-1]
        assert last["samples"] == sum(each["samples"] for each in last["sources"].values()) == 48
        _, skipped_samples, *sources = check(read_samples(tmp_path / "runs" / name))
        assert skipped_samples == "skipped: 8 samples, 16 to 23"
        counts = {text.split(":")[0]: int(text.split()[1]) for text in sources}
        assert counts == {key: each["samples"] for key, each in last["sources"].items()}


FP16 = {"model.dtype": "fp16", "optimizer.loss_scale_window": "3"}
AGAIN: dict[str, tuple[Mapping[str, str], Poison]] = {
    "zero 3": (
        {**DP, "optimizer.zero": "3", "pipeline.schedule": "zb_h1"},
        Poison("gradient", 1, *BAD, times=1),
    ),
    "post-validation": (
        {
            **DP,
            "optimizer.post_validation": "true",
            "pipeline.schedule": "zb_h1",
            # nothing but the fault is a reason to undo an update
            "optimizer.max_grad_norm": "null",
        },
        Poison("gradient", 2, *BAD, times=1),
    ),
    "fp16": ({**DP, **FP16}, Poison("loss", 3, *BAD, times=1)),
    "recomputed": (
        {**TP, "model.dropout": "0.1", "activations.policy": "full"},
        Poison("loss", 2, *BAD, times=1),
    ),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case != "post-validation")) for case in AGAIN],
)
def test_a_fault_of_a_device_is_told_and_leaves_no_trace(case: str, tmp_path: Path) -> None:
    """A NaN is recomputed by itself; another wrong number is, where each step is."""
    given, nan = AGAIN[case]
    finite = replace(nan, factor=1.5)
    clean, once, twice, thrice = run(
        tmp_path,
        Play("clean", given),
        Play("once", given, callbacks=(nan,)),
        Play("twice", {**given, "health.replay_every": "1"}),
        Play("thrice", {**given, "health.replay_every": "3"}, callbacks=(finite,)),
    )
    for ranks in (once, twice, thrice):
        assert_alike(ranks, clean)
    told = {
        name: [note for note in notes(tmp_path, name) if "transient" in note]
        for name in ("clean", "once", "twice", "thrice")
    }
    assert told["clean"] == told["twice"] == []
    (line,) = told["once"]
    assert line.startswith("step 6: loss ")
    assert line.endswith("a transient device fault, and the second result is used")
    (line,) = told["thrice"]
    assert line.startswith("step 6: computed three times (loss ")
