"""The tests that are run on changed files of the core are there, and selected."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutation.places import mutants_of
from tests.mutation.suites import SUITES

ROOT = Path(__file__).parents[2]
NAMED = sorted({name for groups in SUITES.values() for group in groups for name in group})


@pytest.mark.parametrize("name", NAMED)
def test_no_group_is_empty(name: str) -> None:
    file, _, test = name.partition("::")
    functions = [
        node
        for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    named = [each for each in functions if test.partition("[")[0] in ("", each.name)]
    marks = [[ast.unparse(mark) for mark in each.decorator_list] for each in named]
    assert any("pytest.mark.slow" not in of for of in marks), name


@pytest.mark.full
@pytest.mark.parametrize("path", SUITES)
def test_there_is_something_to_change(path: str) -> None:
    assert mutants_of((ROOT / "megapipe" / path).read_bytes())
