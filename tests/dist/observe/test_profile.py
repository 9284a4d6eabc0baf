"""Traces of several ranks, merged by the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.profiled import named, profile_step, read


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return profile_step(tmp_path_factory.mktemp("run"))


@pytest.mark.full
def test_a_merged_trace_has_processes_flows_and_one_clock_for_all(step: Path) -> None:
    run = [sys.executable, "-m", "megapipe.observe.profile", str(step)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(step / "merged.json.gz")
    single, trace = read(step / "rank_0000.json.gz"), read(step / "merged.json.gz")
    names = {e["pid"]: e["args"]["name"] for e in named(trace, "process_name")}
    assert names == {0: "rank 0 (pp 0 dp 0 tp 0)", 12000: "rank 12 (pp 1 dp 0 tp 0)"}
    order = {e["pid"]: e["args"]["sort_index"] for e in named(trace, "process_sort_index")}
    assert order == {0: 0, 12000: 12000}
    first, later = sorted(named(trace, "F stage 0 micro-batch 3"), key=lambda event: event["pid"])
    assert later["ts"] - first["ts"] == pytest.approx(1e6)
    for event in trace["traceEvents"]:
        assert event["pid"] in names
        if "id" in event:
            assert event["id"].startswith(f"{event['pid'] // 1000}/")
    flows = [event["id"] for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len(flows) == 2 * sum(event["ph"] == "s" for event in single["traceEvents"])
    assert len(set(flows)) == len(flows) > 0
    own = [event for event in single["traceEvents"] if isinstance(event.get("pid"), int)]
    assert len(trace["traceEvents"]) == 2 * len(own)
