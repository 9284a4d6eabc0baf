"""Processes take the form of experts that the first of them has chosen by running a layer."""

from __future__ import annotations

from pathlib import Path

from megapipe.cli import parse
from megapipe.config.experts import ExpertsConfig
from megapipe.layout.resolve import BYTE_VOCABULARY, resolve
from megapipe.plan.measurements import BY_UNITS
from tests.parity.jobs import arguments, tiny
from tests.parity.launches import run_forked

RANKS = 4
OPEN = {
    "parallel.ep": str(RANKS),
    "parallel.device": "cpu",
    "plan.link_latency_us": "0",
    "experts.dispatch": "auto",
    "experts.overlap_chunks": "auto",
    "plan.peak_tflops": "0.00001",
    "model.moe.num_experts": "8",
    "model.moe.expert_ffn_hidden": "4",
    "train.sequence_length": "64",
    "train.microbatch": "2",
    "train.global_batch": "8",
}


def test_rank_0_chooses_for_all(tmp_path: Path) -> None:
    """Others measure nothing: each has a folder of its own for that. The run's configuration has
    what a plan has: matrices are fewer bytes than rows, and computing hides the second half."""
    given = arguments({**tiny(tmp_path), **OPEN})
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache of {rank}")}
    outcome = run_forked(tmp_path, RANKS, *given, places=caches)
    assert set(outcome.codes) == {0}, outcome.text
    chosen = parse([str(tmp_path / "runs/run/config.yaml")]).config.experts
    assert chosen == ExpertsConfig(dispatch="fetch", overlap_chunks=2)
    planned, _ = resolve(parse(given).config, RANKS, BYTE_VOCABULARY, measure=BY_UNITS)
    assert planned.experts == chosen
    assert [*tmp_path.glob("cache of */megapipe/units")] == [tmp_path / "cache of 0/megapipe/units"]
