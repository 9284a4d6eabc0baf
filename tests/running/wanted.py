"""Finds the tests that a changed file wants, the best first."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path, PurePosixPath

from tests.running.coverage_records import function_of
from tests.running.functions import parse
from tests.running.map_file import READ, CoverageMap
from tests.running.map_order import is_test_file


@dataclass
class Wanted:
    """The tests for one changed file, the best first."""

    file: str
    tests: list[str]
    reason: str


def wanted_tests(root: Path, known: CoverageMap, file: str, lines: int) -> Wanted:
    """Find the tests for the changed `lines` of a file below `root`; 0 stands for all of it."""
    path = root / file
    text = path.read_text(encoding="utf-8") if file.endswith(".py") and path.exists() else ""
    changed = parse(text).functions_at(lines) if lines and text else None
    if is_test_file(file) and file.endswith(".py"):
        return Wanted(file, tests_of(known, file, text, changed or []), "of its tests")
    functions = {**known.tests.get(file, {})}
    readers = functions.pop(READ, [])
    if lists := [functions[name] for name in changed or [] if name in functions]:
        what = f"{len(lists)} functions" if len(lists) > 1 else "one function"
        return Wanted(file, in_turn([*lists, readers]), f"tests that execute {what}")
    if functions:
        return Wanted(file, in_turn([*functions.values(), readers]), "tests that execute it")
    if file.endswith(".py") and (importers := _importers(root, known, file)):
        lists = [_all_tests(root, known, name) for name in importers]
        return Wanted(file, in_turn([*lists, readers]), "tests of files that import it")
    return Wanted(file, readers, "tests that read it" if readers else "tests: none uses it")


def tests_of(known: CoverageMap, file: str, text: str, changed: Collection[str]) -> list[str]:
    """The tests of a file: those in `changed` functions first, then the shortest.

    Changed ones have all cases, also those that are new, and then the known ones by themselves.
    """
    seconds = known.seconds.get(file, {})
    first = [name for name in names_of_tests(text) if name.replace("::", ".") in changed]
    tests = [
        case
        for function in names_of_tests(text)
        for case in [name for name in seconds if function_of(name) == function] or [function]
    ]
    tests.sort(key=lambda name: (function_of(name) not in first, seconds.get(name, 0.0)))
    return [f"{file}::{name}" for name in dict.fromkeys([*first, *tests])]


def names_of_tests(text: str) -> list[str]:
    """Return the names of the tests in a source, as pytest writes them after the file's name."""
    names = [name.replace(".", "::") for name in parse(text).functions]
    return [name for name in names if name.rpartition("::")[2].startswith("test_")]


def in_turn(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the first of each list, then the second of each and so on; each test once."""
    turns = zip_longest(*lists)
    return [*dict.fromkeys(test for turn in turns for test in turn if test is not None)]


def _all_tests(root: Path, known: CoverageMap, file: str) -> list[str]:
    if is_test_file(file):
        return tests_of(known, file, (root / file).read_text(encoding="utf-8"), [])
    return in_turn(known.tests.get(file, {}).values())


def _importers(root: Path, known: CoverageMap, file: str) -> list[str]:
    """Return the files that import a file; for a conftest.py, the test files below its folder."""
    path = PurePosixPath(file)
    if path.name == "conftest.py":
        return [name for name in known.seconds if path.parent in PurePosixPath(name).parents]
    module = ".".join((path.parent if path.name == "__init__.py" else path.with_suffix("")).parts)
    names = sorted(name for name in {*known.tests, *known.seconds} if name.endswith(".py"))
    return [name for name in names if (root / name).exists() and module in _imports(root / name)]


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, and names in them, which may be modules."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return frozenset(found)
