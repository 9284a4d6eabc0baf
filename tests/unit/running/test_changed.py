"""What scripts/test.sh --changed prints and selects."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.running import changed, selected
from tests.running.changes import Changes
from tests.running.map_file import CoverageMap

FILE = "tests/unit/test_parts.py"
KNOWN = CoverageMap(
    {FILE: {"": 0.0, "test_quick": 1.0, "test_slow": 500.0}},
    {"megapipe/parts.py": {"one": [f"{FILE}::test_slow", f"{FILE}::test_quick"]}},
)


@pytest.fixture
def differ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Changes:
    """Return the changes that the command finds."""
    found = Changes("main")
    monkeypatch.setattr(changed, "changes_since", lambda ref: found)
    monkeypatch.setattr(changed, "load", lambda: KNOWN)
    monkeypatch.setattr(changed, "ROOT", tmp_path)
    return found


def test_nothing_differs(differ: Changes, capsys: pytest.CaptureFixture[str]) -> None:
    assert changed.main([]) == 0
    assert capsys.readouterr().out == "nothing differs from main\n"


def test_it_names_what_runs_and_what_there_is_no_time_for(
    differ: Changes, capsys: pytest.CaptureFixture[str]
) -> None:
    differ.lines = {"megapipe/parts.py": 0, "LICENSE": 2}
    assert changed.main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "compared with main:",
        "  megapipe/parts.py: 1 of 2 tests that execute it",
        "  LICENSE: 0 of 0 tests: none uses it",
        "tests: 1, in files: 1, 1 s of work",
        f"no time for other tests: 1, in {FILE} (1)",
        "all run with: scripts/test.sh --changed --budget 521",
        f"{FILE}::test_quick",
    ]


@pytest.mark.parametrize("built", [True, False])
def test_nothing_is_compiled(
    differ: Changes,
    built: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    test = "tests/fake_cuda/test_device.py::test_a"
    monkeypatch.setattr(changed, "load", lambda: CoverageMap({}, {"a.py": {"f": [test]}}))
    monkeypatch.setattr(changed, "device_is_built", lambda: built)
    differ.lines = {"a.py": 0}
    assert changed.main(["--list"]) == 0
    assert (test in capsys.readouterr().out) is built


def test_tests_are_selected_by_function_or_case(tmp_path: Path) -> None:
    names = tmp_path / "names"
    names.write_text("t.py::test_a\nt.py::test_b[2]")
    items: list[Any] = [
        SimpleNamespace(nodeid=f"t.py::{name}")
        for name in ("test_a[1]", "test_a[x::y]", "test_b[1]", "test_b[2]", "test_c")
    ]
    left: list[Any] = []
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    config: Any = SimpleNamespace(getoption=lambda name: names, hook=hook)
    every = [*items]
    selected.pytest_collection_modifyitems(config, items)
    assert items == [every[0], every[1], every[3]]
    assert left == [every[2], every[4]]
