"""The table of what breaks, in docs/decisions/tests.md, names tests that CI runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs/decisions/tests.md").read_text(encoding="utf-8")
HEADING = "\n## What breaks, and where that is tested\n"
CASES = 49


def cases() -> list[list[str]]:
    """The tests of each row, as `file::name` or `name`."""
    section = PAGE.partition(HEADING)[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")]
    return [re.findall(r"`([^`]+)`", row[2]) for row in rows if row[2].strip() != "tests"]


def named() -> Iterator[tuple[str, str]]:
    """Each test with its file, which is that of the one before where none is named."""
    for row in cases():
        file = ""
        for test in row:
            *given, name = test.split("::")
            file = given[0] if given else file
            yield file, name


@cache
def decorators(file: str) -> dict[str, list[str]]:
    """Of each test of a file."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    return {node.name: [ast.unparse(each) for each in node.decorator_list] for node in found}


def test_each_case_has_tests_that_are_there() -> None:
    assert len(cases()) == CASES
    assert all(cases())
    assert [(file, name) for file, name in named() if name not in decorators(file)] == []


def test_ci_runs_them() -> None:
    assert [name for file, name in named() if "pytest.mark.slow" in decorators(file)[name]] == []
