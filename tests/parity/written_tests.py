"""Tests as written in their files: the marks say what CI runs; nothing is collected."""

from __future__ import annotations

import ast
import functools

from tests.parity.jobs import ROOT

LEFT_OUT = ("pytest.mark.slow", "pytest.mark.gpu")
"""Marks of tests that CI does not run."""


@functools.cache
def run_by_ci(file: str) -> frozenset[str]:
    """Return the test functions of a file, if CI runs at least one of their cases."""
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    whole = [
        ast.unparse(node.value)
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    if any(mark in text for text in whole for mark in LEFT_OUT):
        return frozenset()
    return frozenset(
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if all(map(_lets_some_run, node.decorator_list))
    )


def _lets_some_run(mark: ast.expr) -> bool:
    """Whether a decorator leaves some case not slow; for lists that run in parts, a part is
    named."""
    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "in_parts":
        return any(keyword.arg in ("default", "full") for keyword in mark.keywords)
    return ast.unparse(mark) not in LEFT_OUT
