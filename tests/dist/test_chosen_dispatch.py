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
    "parallel.latency_us": "0",
    "experts.dispatch": "auto",
    "experts.chunks": "auto",
    "log.peak_tflops": "0.00001",
    "model.moe.experts": "8",
    "model.moe.ffn": "4",
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
    assert chosen == ExpertsConfig(dispatch="fetch", chunks=2)
    planned, _ = resolve(parse(given).config, RANKS, BYTE_VOCABULARY, measure=BY_UNITS)
    assert planned.experts == chosen
    assert [*tmp_path.glob("cache of */megapipe/units")] == [tmp_path / "cache of 0/megapipe/units"]


def test_chunks_for_a_device_of_unknown_speed_are_refused_before_all_meet(tmp_path: Path) -> None:
    given = arguments({**tiny(tmp_path), **OPEN, "log.peak_tflops": "null"})
    outcome = run_forked(tmp_path, RANKS, *given)
    assert set(outcome.codes) == {2}, outcome.text
    assert "experts.chunks=auto goes by the speed of the device, which is not kno" in outcome.text
