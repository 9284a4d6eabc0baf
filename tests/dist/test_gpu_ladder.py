"""Processes that the GPU benchmarks start, or a compiler for them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.ladder import load_ladder, toy_work

pytestmark = pytest.mark.full

CPU = torch.device("cpu")


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_ladder(monkeypatch)


@pytest.fixture
def work(ladder: Any, tmp_path: Path) -> Any:
    return toy_work(ladder, tmp_path)


def test_a_worker_that_hangs_or_dies_loses_its_own_rows_only(
    ladder: Any, work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def commanded(code: str) -> str | None:
        monkeypatch.setattr(ladder.bench.Work, "command", lambda _: [sys.executable, "-c", code])
        return ladder.jobs.run_worker(work, 3.0)

    assert commanded("pass") is None
    assert commanded("import os; os.abort()") == "its process ended with exit code -6"
    assert commanded("import time; time.sleep(60)") == "ended after 3 s"


@pytest.mark.slow
def test_the_peer_s_layers_share_a_compilation(ladder: Any) -> None:
    """And the losses are those of the plain model; the second graph is the loss."""
    from torch._dynamo.utils import counters

    size = replace(ladder.sizes.TOY, layers=10)
    losses = []
    counters.clear()
    for compiled in (False, True):
        torch.manual_seed(0)
        side = ladder.sides.HuggingFace(size, CPU, "fp32", compile=compiled)
        losses.append([side.step() for _ in range(2)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert counters["stats"]["unique_graphs"] == 2
