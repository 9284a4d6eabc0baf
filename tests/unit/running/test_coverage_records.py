"""What was recorded is put together, and the map is written and read."""

from __future__ import annotations

import json
from pathlib import Path

from tests.running.coverage_records import FIXTURE, IMPORT, LONG_S, Record, combine, read_records
from tests.running.map_file import CoverageMap, digest, load, save

FILE, SHARED = "tests/unit/test_a.py", f"{FIXTURE}tests/unit::shared"


def record(**seconds: float) -> Record:
    """Make a record of tests that all use one fixture and each execute another line."""
    tests = {f"{FILE}::{name}": test_s for name, test_s in seconds.items()}
    return Record(
        FILE,
        seconds={**tests, SHARED: 3.0},
        fixtures={test: [SHARED] for test in tests},
        opened={f"{IMPORT}{FILE}": ["docs/a.md"], SHARED: ["docs/b.md"]},
        executed={
            SHARED: {"megapipe/a.py": "80", "megapipe/b.py": "2"},
            **{test: {"megapipe/a.py": f"{1 << n:x}"} for n, test in enumerate(tests, 1)},
        },
    )


def test_the_cases_of_a_test_are_one_with_its_fixtures() -> None:
    found = combine([record(**{"test_x[1]": 1.0, "test_x[2]": 2.0})])
    assert found.shared_s == {FILE: 3.0}
    (test,) = found.tests.values()
    assert [*found.tests] == [f"{FILE}::test_x"]
    assert test.seconds == 3.0
    assert test.lines == {"megapipe/a.py": 0x80 | 0b110, "megapipe/b.py": 2}
    assert test.num_lines == 4
    assert test.opened == {"docs/a.md", "docs/b.md"}


def test_long_cases_are_tests_by_themselves() -> None:
    cases = {"test_x[1]": LONG_S / 2, "test_x[2]": LONG_S}
    found = combine([record(**cases)])
    assert [test.seconds for test in found.tests.values()] == [*cases.values()]
    assert [*found.tests] == [f"{FILE}::{case}" for case in cases]
    assert found.tests[f"{FILE}::test_x[2]"].lines["megapipe/a.py"] == 0x80 | 0b100


def test_a_fixture_of_a_folder_counts_for_the_files_of_all_workers() -> None:
    other = Record(
        "tests/unit/test_b.py",
        seconds={"tests/unit/test_b.py::test_y": 1.0},
        fixtures={"tests/unit/test_b.py::test_y": [SHARED]},
    )
    found = combine([other, record(test_x=1.0)])
    assert found.tests["tests/unit/test_b.py::test_y"].lines["megapipe/b.py"] == 2


def test_records_are_read_but_for_a_line_that_is_not_complete(tmp_path: Path) -> None:
    line = json.dumps(vars(record(test_x=1.0)))
    (tmp_path / "1.jsonl").write_text(f"{line}\n{line[:40]}")
    assert read_records(tmp_path) == [record(test_x=1.0)]


def test_a_map_is_read_as_it_was_written(tmp_path: Path) -> None:
    names = [f"{FILE}::test_x[ä b]", f"{FILE}::test_y"]
    content = CoverageMap(
        {FILE: {"": 0.0, "test_x[ä b]": 1.5, "test_y": 0.25}},
        {"megapipe/a.py": {"f": names, "": names, "C.g": names[::-1]}, "megapipe/b.py": {}},
    )
    save(content, tmp_path / "map")
    assert load(tmp_path / "map") == content
    lines = (tmp_path / "map").read_text(encoding="utf-8").splitlines()
    assert f'" f": "{digest(names[0])} {digest(names[1])}"' in [line.strip(",") for line in lines]


def test_tests_that_are_gone_are_left_out_of_the_map(tmp_path: Path) -> None:
    names = [f"{FILE}::test_x", f"{FILE}::test_gone"]
    save(CoverageMap({FILE: {"test_x": 1.0}}, {"megapipe/a.py": {"f": names}}), tmp_path / "map")
    assert load(tmp_path / "map").tests == {"megapipe/a.py": {"f": names[:1]}}


def test_there_may_be_no_map(tmp_path: Path) -> None:
    assert load(tmp_path / "map") == CoverageMap({}, {})
