"""The order of the tests of a function, and the map that is built of what was recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running.coverage_records import Recorded, Test
from tests.running.functions import line_range
from tests.running.map_file import CoverageMap
from tests.running.map_order import MOST, build, mirrors, order, update

FILE = "megapipe/room/thing.py"
NEAR, FAR = "tests/unit/room/test_thing.py", "tests/dist/test_far.py"


def executes(*lines: int, seconds: float = 1.0, elsewhere: int = 0) -> Test:
    """Make a test that executes these lines of the file and `elsewhere` lines of another one."""
    bits = sum(1 << line for line in lines)
    return Test(seconds, {FILE: bits, "megapipe/other.py": line_range(1, elsewhere)})


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/unit/room/test_thing.py::test_a", True),
        ("tests/dist/room/test_thing.py::test_a[1]", True),
        ("tests/dist/test_thing.py::test_a", True),
        ("tests/unit/attic/test_thing.py::test_a", False),
        ("tests/unit/room/test_things.py::test_a", False),
    ],
)
def test_a_file_of_tests_mirrors_one_of_its_name_and_room(test: str, expected: bool) -> None:
    assert mirrors(test, FILE) is expected


def test_first_come_lines_that_no_test_before_has_executed() -> None:
    tests = {
        f"{FAR}::test_half": executes(1, 2),
        f"{FAR}::test_same_half": executes(1, 2, elsewhere=5),
        f"{FAR}::test_rest": executes(3),
    }
    assert order(FILE, line_range(1, 3), tests) == [
        f"{FAR}::test_half",
        f"{FAR}::test_rest",
        f"{FAR}::test_same_half",
    ]


def test_the_quick_one_comes_before_the_slow_one() -> None:
    tests = {f"{FAR}::a": executes(1, 2, seconds=9.0), f"{FAR}::b": executes(1, 2)}
    assert order(FILE, line_range(1, 2), tests) == [f"{FAR}::b", f"{FAR}::a"]


def test_tests_that_mirror_the_file_come_before_quicker_ones() -> None:
    tests = {f"{FAR}::test_a": executes(1, 2), f"{NEAR}::test_b": executes(1, seconds=9.0)}
    assert order(FILE, line_range(1, 2), tests) == [f"{NEAR}::test_b", f"{FAR}::test_a"]


def test_then_come_tests_that_know_little_else() -> None:
    tests = {
        f"{FAR}::test_{number}": executes(1, seconds=number, elsewhere=10 - number)
        for number in range(MOST + 2)
    }
    names = order(FILE, line_range(1, 1), tests)
    assert names == [f"{FAR}::test_{number}" for number in (0, *range(MOST + 1, 2, -1))][:MOST]


def test_tests_that_execute_another_function_are_left_out() -> None:
    assert order(FILE, line_range(1, 3), {f"{FAR}::test_a": executes(4, 5)}) == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for file in (FILE, NEAR, FAR):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / FILE).write_text("def one():\n    return 1\n\n\ndef two():\n    return 2\n")
    return tmp_path


def test_the_map_has_functions_and_files_that_are_read(root: Path) -> None:
    one, both = executes(2), executes(2, 6)
    both.opened = {"docs/page.md", "not/in/the/repository"}
    recorded = Recorded(
        {f"{NEAR}::test_one": one, f"{FAR}::test_both": both}, {NEAR: 0.5, FAR: 0.0}
    )
    files = ["docs/page.md", "docs/unread.md", FILE, NEAR, FAR]
    (root / "docs").mkdir()
    assert build(root, files, recorded) == CoverageMap(
        {NEAR: {"": 0.5, "test_one": 1.0}, FAR: {"": 0.0, "test_both": 1.0}},
        {
            "docs/page.md": {"": [f"{FAR}::test_both"]},
            FILE: {"one": [f"{NEAR}::test_one", f"{FAR}::test_both"], "two": [f"{FAR}::test_both"]},
        },
    )


def test_a_file_that_no_test_executes_has_its_place_in_the_map(root: Path) -> None:
    assert build(root, [FILE], Recorded()) == CoverageMap({}, {FILE: {}})


def test_an_update_replaces_what_is_known_of_the_recorded_files() -> None:
    known = CoverageMap(
        {NEAR: {"": 0.0, "test_gone": 1.0}, FAR: {"": 0.0, "test_far": 2.0}},
        {FILE: {"one": [f"{NEAR}::test_gone", f"{FAR}::test_far"], "two": [f"{NEAR}::test_gone"]}},
    )
    new = CoverageMap({NEAR: {"": 1.0, "test_new": 3.0}}, {FILE: {"one": [f"{NEAR}::test_new"]}})
    assert update(known, new) == CoverageMap(
        {NEAR: {"": 1.0, "test_new": 3.0}, FAR: {"": 0.0, "test_far": 2.0}},
        {FILE: {"one": [f"{NEAR}::test_new", f"{FAR}::test_far"]}},
    )


def test_an_update_keeps_the_order_and_puts_strangers_last() -> None:
    seconds = {NEAR: {"": 0.0}, FAR: {"": 0.0}}
    known = CoverageMap(seconds, {FILE: {"one": [f"{FAR}::test_b", f"{NEAR}::test_a"]}})
    new = CoverageMap({FAR: {"": 0.0}}, {FILE: {"one": [f"{FAR}::test_new", f"{FAR}::test_b"]}})
    assert update(known, new).tests == {
        FILE: {"one": [f"{FAR}::test_b", f"{NEAR}::test_a", f"{FAR}::test_new"]}
    }
