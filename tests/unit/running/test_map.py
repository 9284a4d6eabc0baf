"""The map knows all files of the package and of the tests, and only tests that exist."""

from __future__ import annotations

import re

import pytest

from tests.running.coverage_records import function_of
from tests.running.map_file import ROOT, SHARED, CoverageMap, load

SOURCES = ("megapipe/**/*.py", "scripts/*.py", "benchmarks/**/*.py", "examples/**/*.py", "train.py")


@pytest.fixture(scope="module")
def known() -> CoverageMap:
    return load()


@pytest.fixture(scope="module")
def names() -> dict[str, set[str]]:
    """Return the names of the tests of each file, without those of their classes."""
    found = {
        path.relative_to(ROOT).as_posix(): {
            *re.findall(r"(?m)^ *def (test_\w+)", path.read_text("utf-8"))
        }
        for path in ROOT.glob("tests/**/test_*.py")
    }
    return {file: tests for file, tests in found.items() if tests}


def test_every_file_of_tests_is_in_the_map(known: CoverageMap, names: dict[str, set[str]]) -> None:
    missing = sorted(names.keys() - known.seconds.keys())
    assert not missing, f"run scripts/test.sh --map {' '.join(missing)}"


def test_every_source_file_is_in_the_map(known: CoverageMap) -> None:
    paths = [path for pattern in SOURCES for path in ROOT.glob(pattern)]
    sources = {path.relative_to(ROOT).as_posix() for path in paths}
    missing = sorted(sources - known.tests.keys())
    assert not missing, f"not in the map: {missing}; run scripts/test.sh --map with their tests"


def test_every_test_of_the_map_exists(known: CoverageMap, names: dict[str, set[str]]) -> None:
    gone = sorted(
        f"{file}::{test}"
        for file, tests in known.seconds.items()
        for test in tests
        if test != SHARED and function_of(test).rpartition("::")[2] not in names.get(file, ())
    )
    assert not gone, f"gone: {gone}; run scripts/test.sh --map with their files"
