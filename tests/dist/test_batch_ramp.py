"""A batch that grows: the same losses, norms and samples in every layout, and over a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megapipe.observe.sample_log import check, read_samples
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked

RAMP = {
    "train.steps": "9",
    "train.global_batch": "12",
    "train.batch_ramp": "[4, 4, 21]",
    "train.microbatch": "1",
    "train.validate_every": "4",
    "model.dtype": "fp64",
    "model.layers": "4",
    "log.sample_ids": "true",
}
BATCHES = [4, 4, 4, 8, 8, 12, 12, 12, 12]


def steps(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs/run/log.jsonl").read_text().splitlines()
    found = {r["step"]: r for r in map(json.loads, lines) if r["kind"] == "step"}
    return [found[step] for step in sorted(found)]


@pytest.mark.full
def test_layouts_and_a_resume_change_nothing(tmp_path: Path) -> None:
    """One process; and interleaved stages with post-validation, resumed within the ramp."""
    alone, several = tmp_path / "alone", tmp_path / "several"
    for folder in (alone, several):
        folder.mkdir()
    clipped = {**RAMP, "optimizer.max_grad_norm": "0.7"}
    outcome = run_forked(alone, 1, *arguments({**tiny(alone), **clipped}))
    assert set(outcome.codes) == {0}, outcome.text
    layout = {
        "parallel.pp": "2",
        "parallel.dp": "2",
        "pipeline.schedule": "interleaved_1f1b",
        "pipeline.chunks": "2",
        "optimizer.post_validation": "true",
    }
    for more in ({"train.stop_after": "4"}, {}):
        given = {
            **tiny(several),
            **clipped,
            **layout,
            **more,
            "data.source": str(alone / "corpus.txt"),
        }
        outcome = run_forked(several, 4, *arguments(given))
        assert set(outcome.codes) == {0}, outcome.text
    found, expected = steps(several), steps(alone)
    assert [step["tokens"] // 16 for step in expected] == BATCHES
    for some, right in zip(found, expected, strict=True):
        for key in ("loss", "grad_norm", "lr"):
            assert some[key] == pytest.approx(right[key], rel=1e-9), (key, right["step"])
        assert (some["samples"], some["tokens"]) == (right["samples"], right["tokens"])
    taken = read_samples(several / "runs/run")
    assert [len(samples) for samples in taken.steps.values()] == BATCHES
    assert check(taken)[0].startswith("steps 1 to 9 took samples 0 to 75 of the run")
