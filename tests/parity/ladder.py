"""The GPU benchmarks as a package, and toy-size work for them."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import pytest

from tests.parity.jobs import ROOT

BENCHMARKS = ROOT / "benchmarks"


def load_ladder(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the package, with its modules as attributes."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    package = importlib.import_module("ladder")
    for path in (BENCHMARKS / "ladder").glob("[!_]*.py"):
        importlib.import_module(f"ladder.{path.stem}")
    return package


def toy_work(ladder: Any, folder: Path) -> Any:
    file = folder / "records"
    file.touch()
    now = time.time()
    return ladder.bench.Work("ours", "toy", "cpu", str(file), now, steps=1, compile=False)
