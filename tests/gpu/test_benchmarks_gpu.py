"""The GPU benchmarks at toy size on a device: rows, peaks, out-of-memory errors, measured costs."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MODULES = ("bench", "jobs", "memory", "records", "sides", "sizes")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in MODULES:
        importlib.import_module(f"ladder.{name}")
    return importlib.import_module("ladder")


@pytest.fixture
def mesh(ladder: Any) -> Iterator[Any]:
    yield ladder.sides.single_mesh(torch.device("cuda"))
    dist.destroy_process_group()


def test_workers_write_their_rows(ladder: Any, tmp_path: Path) -> None:
    file = tmp_path / "records"
    file.touch()
    template = ladder.bench.Work(
        "ours", "toy", "cuda", str(file), time.time(), steps=5, compile=False
    )
    toy = ladder.sizes.TOY
    jobs = ladder.jobs.plan([toy], ["ours", "peer", "ablations"], toy, template)
    records = ladder.jobs.run_all(jobs, 400.0)
    rows = [record for record in records if isinstance(record, ladder.records.Row)]
    assert [row.side for row in rows] == ["megapipe", "Hugging Face"]
    for row in rows:
        assert row.rows == toy.most
        assert len(row.times) == 5
        assert row.peak is not None
        assert row.peak > 0
        assert "bf16 weights, fp32 masters" in row.state
    (calibration,) = (r for r in records if isinstance(r, ladder.records.Calibration))
    assert calibration.attention["flash"] is not None
    assert any(isinstance(record, ladder.records.Split) for record in records)
    failed = [r for r in records if isinstance(r, ladder.records.Missing) and "exit" in r.why]
    assert not failed


def test_memory_that_ran_out_is_given_back(ladder: Any, mesh: Any) -> None:
    """Memory runs out within a step; later steps equal those of a side that always had enough."""
    size = replace(ladder.sizes.TOY, family={"vocab_size": 64, "bias": False})
    expected_side = ladder.sides.Ours(size, mesh, 2)
    expected = [expected_side.step() for _ in range(2)]
    side = ladder.sides.Ours(size, mesh, size.most)
    layers = next(iter(side.train.modules.values())).layers
    before = torch.cuda.memory_allocated()

    def take(*_: Any) -> None:
        torch.empty(2**50, dtype=torch.uint8, device="cuda")

    hook = layers.register_forward_hook(take)
    assert not ladder.memory.fits(side.step)
    hook.remove()
    side.rows = 2
    assert [side.step() for _ in range(2)] == pytest.approx(expected, rel=1e-3)
    assert torch.cuda.memory_allocated() - before < 2**24


def test_operations_are_measured_and_projected(ladder: Any, mesh: Any) -> None:
    projection = importlib.import_module("gpu_projection")
    measured = projection.measure(ladder.sizes.TOY, 2, 1, 3, mesh)
    for kind in "FIWB":
        assert measured.parts[kind].layer > 0
    assert measured.gaps >= 1.0
    links = projection.Links((1e-5, 1e-5), (1e11, 1e10))
    found = list(projection.project_all(measured, links, ["1f1b", "zb_h1"], [2, 4], 4, 60.0))
    assert [(each.schedule, each.ranks) for each in found] == [
        ("1f1b", 2),
        ("zb_h1", 2),
        ("1f1b", 4),
        ("zb_h1", 4),
    ]
