"""The table of what breaks, in docs/decisions/tests.md, names tests that CI runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.parity.written_tests import run_by_ci

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/decisions/tests.md").read_text(encoding="utf-8")
HEADING = "\n## What breaks, and where that is tested\n"
CASES = 49


def cases() -> list[list[str]]:
    """Return the tests of each row, as `file::name` or `name`."""
    section = PAGE.partition(HEADING)[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    return [re.findall(r"`([^`]+)`", row[2]) for row in rows if row[2].strip() != "tests"]


def named() -> Iterator[tuple[str, str]]:
    """Yield each test with its file, which is that of the test before if it names none."""
    for row in cases():
        file = ""
        for test in row:
            *given, name = test.split("::")
            file = given[0] if given else file
            yield file, name


def test_each_case_has_tests_that_ci_runs() -> None:
    assert len(cases()) == CASES
    assert all(cases())
    missing = [test for test in named() if test[1] not in run_by_ci(f"tests/{test[0]}")]
    assert missing == []
