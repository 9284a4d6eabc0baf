"""A profiled step, and the contents of its traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import record_function

from megapipe.observe.profile import StepProfile


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event.get("name") == name]


def profile_step(folder: Path) -> Path:
    """Write a profiled step of this process as rank 0, and the same step as rank 12 of a host whose
    clock starts a second later."""
    profile = StepProfile(folder, 20, rank=0, place="pp 0 dp 0 tp 0", on_gpu=False)
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
