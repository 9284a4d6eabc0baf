"""Traces of a step: what is written per rank, and what becomes of them together."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from megapipe.errors import DataError
from megapipe.observe.profile import StepProfile, merge


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("name") == name]


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profiled step of this process as rank 0, and the same as rank 12 of a host whose times
    count from a second later."""
    profile = StepProfile(
        tmp_path_factory.mktemp("run"), 20, rank=0, place="pp 0 dp 0 tp 0", on_gpu=False
    )
    profile.start()
    with record_function("F stage 0 micro-batch 3"):
        x = torch.ones(4, 4, requires_grad=True)
        (x @ x).sum().backward()
    profile.stop()
    path = profile.folder / "rank_0000.json.gz"
    trace = read(path)
    trace["megapipe"].update(rank=12, place="pp 1 dp 0 tp 0")
    trace["baseTimeNanoseconds"] += 10**9
    (profile.folder / "rank_0012.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))
    return profile.folder


def test_a_rank_s_trace_has_names_operators_and_its_place(step: Path) -> None:
    assert step.name == "step_000020"
    trace = read(step / "rank_0000.json.gz")
    assert trace["megapipe"] == {"rank": 0, "place": "pp 0 dp 0 tp 0", "step": 20}
    (operation,) = named(trace, "F stage 0 micro-batch 3")
    (matmul,) = named(trace, "aten::mm")[:1]
    assert operation["ts"] <= matmul["ts"]
    assert matmul["ts"] + matmul["dur"] <= operation["ts"] + operation["dur"]


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


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no rank_\*.json.gz, expected the folder of a profiled"):
        merge(tmp_path)
    for content in (b"", b"{", gzip.compress(b"{}"), gzip.compress(b"{}")[:-3]):
        (tmp_path / "rank_0001.json.gz").write_bytes(content)
        with pytest.raises(DataError, match=r"rank_0001.json.gz: no trace of a rank"):
            merge(tmp_path)
