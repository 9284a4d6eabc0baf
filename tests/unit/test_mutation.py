"""The tests that are run on changed files of the core are there, and selected."""

from __future__ import annotations

from pathlib import Path

from tests.mutation.mutation_sites import mutants_of
from tests.mutation.suites import SUITES
from tests.parity.tiers import in_parts
from tests.parity.written_tests import run_by_ci

ROOT = Path(__file__).parents[2]
NAMED = sorted({name for groups in SUITES.values() for group in groups for name in group})


def test_no_group_is_empty() -> None:
    for name in NAMED:
        file, _, test = name.partition("::")
        found = run_by_ci(file)
        assert test.partition("[")[0] in found if test else found, name


@in_parts("path", SUITES, full=8)
def test_there_is_something_to_change(path: str) -> None:
    assert mutants_of((ROOT / "megapipe" / path).read_bytes())
