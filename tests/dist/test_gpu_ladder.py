"""Processes that the GPU benchmarks start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity.ladder import load_ladder, toy_work

pytestmark = pytest.mark.full


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
