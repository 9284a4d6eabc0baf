"""Benchmarks run at toy size and keep to their form; no timing is asserted."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.name != "common.py")


def run(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path), *options],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )


def test_there_are_benchmarks() -> None:
    assert BENCHMARKS


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_a_benchmark_prints_a_table_and_writes_its_results(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    done = run(path, "--quick", "--json", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))
    assert results
    for result in results:
        assert list(result) == ["claim", "value", "target", "unit", "peer", "met"]
        assert all(isinstance(result[key], str) for key in ("claim", "unit", "peer"))
        assert math.isfinite(result["value"])
        assert math.isfinite(result["target"])
        assert isinstance(result["met"], bool)
    assert len({result["claim"] for result in results}) == len(results)
    for heading in results[0]:
        assert heading in done.stdout


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_an_unknown_option_is_refused(path: Path) -> None:
    assert run(path, "--fast").returncode == 2


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import common

    return common


def test_met_is_computed_from_value_and_target(common) -> None:  # type: ignore[no-untyped-def]
    for value, at_least, met in [
        (1.0, False, True),
        (2.0, False, True),
        (2.1, False, False),
        (1.9, True, False),
        (2.0, True, True),
        (math.nan, False, False),
    ]:
        result = common.Result("c", value, 2.0, "x", "p", at_least=at_least)
        assert result.met is met
        assert result.as_json()["met"] is met


def test_sides_are_timed_in_turn_and_the_first_round_dropped(common) -> None:  # type: ignore[no-untyped-def]
    calls = []

    def side(name: str, times: list[float]) -> float:
        calls.append(name)
        return times.pop(0)

    ours, theirs = [100.0, 2.0, 3.0, 8.0], [1.0, 2.0, 2.0, 2.0]
    times = common.compare(lambda: side("a", ours), lambda: side("b", theirs), rounds=3)
    assert "".join(calls) == "baabbaab"
    assert times.ours == (2.0, 3.0, 8.0)
    assert times.ratio == 1.5, "the median of 1, 1.5 and 4"
