"""The samples that a run logs: each once and in order, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from megapipe.observe.sample_log import check, read_samples
from tests.parity.stopped_runs import Play, run
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full

TWO = {axis: {f"parallel.{axis}": "2"} for axis in ("pp", "dp", "tp", "cp")}
EXPERTS = {"model.moe.num_experts": "4", "parallel.ep": "2", "parallel.sequence_parallel": "true"}
LAYOUTS: dict[str, Mapping[str, str]] = {
    "dp2 cp2": TWO["dp"] | TWO["cp"],
    "tp2 cp2": TWO["tp"] | TWO["cp"],
    "pp2 dp2": TWO["pp"] | TWO["dp"],
    "dp2 ep2": TWO["dp"] | TWO["tp"] | EXPERTS,
    "bidirectional": {"parallel.pp": "4", "pipeline.schedule": "chimera"},
    "slices": TWO["pp"]
    | TWO["cp"]
    | {"pipeline.sequence_slices": "2", "pipeline.schedule": "seq1f1b"},
}


@in_parts("layout", LAYOUTS, full=["dp2 cp2", "bidirectional"])
def test_each_sample_is_logged_once(layout: str, tmp_path: Path) -> None:
    settings = {**LAYOUTS[layout], "log.sample_ids": "true", "train.steps": "3"}
    (ranks,) = run(tmp_path, Play("run", settings))
    assert all(rank["error"] is None for rank in ranks), ranks[0]["error"]
    lines = check(read_samples(tmp_path / "runs/run"))
    assert lines[0] == "steps 1 to 3 took samples 0 to 23 of the run, each once and in order"
