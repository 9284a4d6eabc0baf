"""Which tests a change wants, and which of them there is time for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running.choice import UNKNOWN_S, choose
from tests.running.map_file import CoverageMap
from tests.running.wanted import Wanted, wanted_tests

PARTS, CONSTANTS, TESTS = "megapipe/parts.py", "megapipe/constants.py", "tests/unit/test_parts.py"
SOURCES = {
    PARTS: "from megapipe import constants\n\ndef one():\n    pass\n\ndef two():\n    pass\n",
    CONSTANTS: "LIMIT = 3\n",
    TESTS: "from megapipe import parts\n\ndef test_a():\n    pass\n\ndef test_b():\n    pass\n",
}
KNOWN = CoverageMap(
    {TESTS: {"": 0.0, "test_a": 4.0, "test_b[1]": 1.0, "test_b[2]": 2.0}},
    {
        PARTS: {"": ["readers"], "one": ["a", "b"], "two": ["c"]},
        CONSTANTS: {"": ["readers"]},
        "docs/page.md": {"": ["page"]},
    },
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file, text in SOURCES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def bits(*lines: int) -> int:
    return sum(1 << line for line in lines)


@pytest.mark.parametrize(
    ("file", "lines", "tests"),
    [
        pytest.param(PARTS, bits(4), ["a", "readers", "b"], id="function"),
        pytest.param(PARTS, bits(1), ["a", "c", "readers", "b"], id="statement"),
        pytest.param(PARTS, 0, ["a", "c", "readers", "b"], id="whole"),
        pytest.param("docs/page.md", bits(3), ["page"], id="page"),
        pytest.param("docs/other.md", bits(3), [], id="unread page"),
        # of field_mappings.py, which imports it
        pytest.param(CONSTANTS, bits(1), ["readers", "a", "c", "b"], id="constants"),
    ],
)
def test_a_change_wants_the_tests_that_execute_or_read_it(
    root: Path, file: str, lines: int, tests: list[str]
) -> None:
    assert wanted_tests(root, KNOWN, file, lines).tests == tests


def test_a_file_that_is_new_wants_the_tests_that_import_it(root: Path) -> None:
    known = CoverageMap(KNOWN.seconds, {})
    names = ("test_b[1]", "test_b[2]", "test_a")
    assert wanted_tests(root, known, PARTS, 0).tests == [f"{TESTS}::{name}" for name in names]


def test_a_conftest_wants_the_tests_of_its_folder(root: Path) -> None:
    known = CoverageMap({TESTS: {}, "tests/dist/test_other.py": {}}, {})
    tests = wanted_tests(root, known, "tests/unit/conftest.py", 0).tests
    assert tests == [f"{TESTS}::test_a", f"{TESTS}::test_b"]


def test_a_file_of_tests_wants_its_own_with_new_cases_of_changed_ones(root: Path) -> None:
    names = ("test_b", "test_b[1]", "test_b[2]", "test_a")
    assert wanted_tests(root, KNOWN, TESTS, bits(7)).tests == [f"{TESTS}::{x}" for x in names]


def test_a_file_that_is_gone_wants_the_tests_that_executed_it(root: Path) -> None:
    (root / PARTS).unlink()
    assert wanted_tests(root, KNOWN, PARTS, 0).tests == ["a", "c", "readers", "b"]


def timed(**seconds: float) -> CoverageMap:
    return CoverageMap({"t.py": {"": 0.0, **seconds}}, {})


def named(*names: str) -> list[str]:
    return [f"t.py::{name}" for name in names]


def test_changed_files_share_the_time() -> None:
    wanted = [Wanted("first", named("a", "b", "c"), ""), Wanted("second", named("d", "e"), "")]
    choice = choose(timed(a=1.0, b=1.0, c=1.0, d=2.0, e=1.0), wanted, total_s=4.0, longest_s=9.0)
    assert [*choice.chosen] == named("a", "d", "b")
    assert choice.left == named("c", "e")


def test_a_test_that_is_too_long_makes_room_for_others() -> None:
    wanted = [Wanted("first", named("long", "short"), "")]
    choice = choose(timed(long=5.0, short=1.0), wanted, total_s=4.0, longest_s=9.0)
    assert ([*choice.chosen], choice.left) == (named("short"), named("long"))


def test_no_file_of_tests_keeps_one_worker_too_long() -> None:
    known = CoverageMap({"t.py": {"": 2.0, "a": 1.0, "b": 1.0}, "u.py": {"": 0.0, "c": 2.0}}, {})
    wanted = [Wanted("first", [*named("a", "b"), "u.py::c"], "")]
    choice = choose(known, wanted, total_s=9.0, longest_s=3.0)
    assert choice.chosen == {"t.py::a": 3.0, "u.py::c": 2.0}  # with 2 s of shared fixtures
    assert choice.files == ["t.py", "u.py"]


def test_cases_are_taken_one_by_one_where_there_is_no_time_for_all() -> None:
    wanted = [Wanted("t.py", named("a", "a[1]", "a[2]"), "")]
    known = timed(**{"a[1]": 1.0, "a[2]": 2.0})
    assert choose(known, wanted, total_s=9.0, longest_s=9.0).chosen == {"t.py::a": 3.0}
    assert choose(known, wanted, total_s=2.0, longest_s=9.0).chosen == {"t.py::a[1]": 1.0}


def test_a_test_without_a_time_is_taken_for_a_quick_one() -> None:
    wanted = [Wanted("t.py", named("new"), "")]
    assert choose(timed(), wanted, total_s=9.0, longest_s=9.0).chosen == {"t.py::new": UNKNOWN_S}
