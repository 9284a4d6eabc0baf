"""Benchmarks run at toy size; no timing is asserted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.benchmark_files import BENCHMARKS

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
CHEAPEST = "schedule_scale"
"""Benchmark that CI runs for all of them: their command line, table and file of results are shared
code."""
COUNTING = ("context_parallel", "memory", "large_worlds", "zero")
"""Benchmarks that compare bytes and calls with formulas, which no machine makes slower."""


HEADINGS = ("claim", "value", "target", "unit", "peer", "met")


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path), *options],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=() if p.stem == CHEAPEST else pytest.mark.slow, id=p.stem)
        for p in BENCHMARKS
    ],
)
def test_a_benchmark_prints_a_table_and_writes_its_results(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = run(path, "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results
    for result in results:
        assert list(result) == [*HEADINGS, "at_least"]
        assert all(isinstance(result[key], str) for key in ("claim", "unit", "peer"))
        assert math.isfinite(result["value"])
        assert math.isfinite(result["target"])
        assert isinstance(result["met"], bool)
    assert len({result["claim"] for result in results}) == len(results)
    by_formula = [result for result in results if result["peer"].startswith("formula")]
    assert [r for r in by_formula if not r["met"]] == [], "what is counted holds at any size"
    assert bool(by_formula) == (path.stem in COUNTING)
    for heading in HEADINGS:
        assert heading in done.stdout
