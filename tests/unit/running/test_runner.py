"""What the runner of tests makes of files, times and pages (tests/running)."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.running import __main__ as command
from tests.running import lowest_python, slow, stdlib_imports, time_report, times
from tests.running.record import Record, TimedTest, WholeRun

ROOT = Path(__file__).parents[3]


def test_the_lowest_python_is_the_same_for_all_tools() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    major, minor = lowest_python.declared()
    assert tools["ruff"]["target-version"] == f"py{major}{minor}"
    assert tools["mypy"]["python_version"] == f"{major}.{minor}"
    installer = (ROOT / "scripts/venv.sh").read_text()
    assert f"sys.version_info < ({major}, {minor})" in installer
    assert f"Python {major}.{minor} or newer" in installer


IMPORTS = """
import sys
from collections import abc, nowhere
import os.nowhere
from numpy import nowhere
if TYPE_CHECKING:
    import sys.never
elif flag:
    import sys.other
if sys.version_info >= (99, 0):
    import sys.future
else:
    import sys.past
try:
    import sys.optional
except ImportError:
    import sys.instead
from json import *
def function():
    from json.decoder import JSONDecoder, later
"""


def test_imports_that_this_version_lacks(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(IMPORTS)
    found = list(stdlib_imports.mistakes(str(file), {"collections", "os", "json", "sys"}))
    names = [line.removeprefix(f"{file}:").partition(": there is no ") for line in found]
    assert [(int(line), name) for line, _, name in names] == [
        (3, "collections.nowhere"),
        (4, "os.nowhere"),
        (9, "sys.other"),
        (13, "sys.past"),
        (17, "sys.instead"),
        (20, "json.decoder.later"),
    ]
    file.write_text("\nx = = 1\n")
    (line,) = stdlib_imports.mistakes(str(file), set())
    assert line == f"{file}:2: invalid syntax"


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("typing.TYPE_CHECKING", False),
        ("sys.version_info[:2] >= (3, 0)", True),
        ("sys.version_info < (3, 0)", False),
        ("sys.version_info >= (3, 0) and wanted", None),
        ("sys.platform == 'linux'", None),
    ],
)
def test_conditions(text: str, holds: bool | None) -> None:
    assert stdlib_imports.condition(ast.parse(text, mode="eval").body) == holds


def test_changed_files_come_first() -> None:
    items: list[Any] = [SimpleNamespace(path=Path(f"/r/{name}")) for name in "abcabc"]
    config: Any = SimpleNamespace(rootpath=Path("/r"), getoption=lambda _: ["c", "b", "gone"])
    times.pytest_collection_modifyitems(config, items)
    assert [item.path.name for item in items] == [*"bcbc", *"aa"]


TESTS = [
    TimedTest("tests/a.py::one", 3.0, "world", "passed"),
    TimedTest("tests/b.py::two[x]", 5.0, "job", "failed"),
    TimedTest("tests/a.py::three", 1.0, "plain", "skipped"),
]
RUN = WholeRun("scripts/test.sh", "abc", {"lint": 1.0, "tests": 7.0}, Record(TESTS, [0.5, 0.5]))


def test_times_by_kind_file_and_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(time_report, "ROOT", tmp_path)
    monkeypatch.setattr(WholeRun, "last", lambda: RUN)
    page = tmp_path / time_report.PAGE
    page.parent.mkdir(parents=True)
    assert time_report.main(str(tmp_path / "times.tsv")) == 0
    printed = capsys.readouterr().out
    assert "3 tests in 8 s" in printed
    assert "50.0%      1 tests  job" in printed
    assert "| imports | 0 | 1 | 10.0% | imports and collection" in page.read_text()
    assert "| `tests/b.py` | 1 | 5 |\n| `tests/a.py` | 2 | 4 |\n" in page.read_text()
    assert (tmp_path / "times.tsv").read_text().splitlines()[1:] == [
        "file\ttests/b.py\t5.000\t\t",
        "file\ttests/a.py\t4.000\t\t",
        "test\ttests/b.py::two[x]\t5.000\tjob\tfailed",
        "test\ttests/a.py::one\t3.000\tworld\tpassed",
        "test\ttests/a.py::three\t1.000\tplain\tskipped",
    ]


def test_the_page_of_slow_tests_keeps_what_has_run(tmp_path: Path) -> None:
    page = tmp_path / "slow_tests.md"
    assert slow.read(page) == {}
    failed = slow.result(1, Record(TESTS))
    assert failed == "1 failed: `two[x]`"
    ran = slow.Part("tests/a.py", 2, "2026-11-28", "abc+changes", "12", failed)
    external, gone = replace(ran, file="tests/external.py"), replace(ran, file="tests/gone.py")
    slow.write(page, {part.file: part for part in (ran, external, gone)})
    known = slow.read(page)
    assert known == {part.file: part for part in (ran, external, gone)}
    parts = slow.update(known, {"tests/a.py": 3, "tests/b.py": 1}, {"tests/external.py"})
    assert parts == {
        "tests/a.py": replace(ran, tests=3),
        "tests/b.py": slow.Part("tests/b.py", 1),
        "tests/external.py": external,
    }
    assert (
        "| `tests/b.py` | 1 |  |  |  | not run since the list began |" in parts["tests/b.py"].row()
    )


@pytest.mark.parametrize(
    ("code", "outcomes", "said"),
    [
        (0, ["passed", "passed"], "2 passed"),
        (0, ["passed", "skipped"], "1 passed, 1 skipped"),
        (2, [], "pytest ended with exit code 2"),
    ],
)
def test_results_of_slow_tests(code: int, outcomes: list[str], said: str) -> None:
    tests = [TimedTest("tests/a.py::b", 1.0, "plain", outcome) for outcome in outcomes]
    assert slow.result(code, Record(tests)) == said


@pytest.mark.parametrize(
    "argv", [["--list"], ["--full", "--slow"], ["--times", "x", "-k", "y"], ["--slow", "-k", "y"]]
)
def test_wrong_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(argv)
    assert caught.value.code == 2
    assert "scripts/test.sh: error: " in capsys.readouterr().err
