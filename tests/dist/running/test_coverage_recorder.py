"""Tests are recorded with the processes that they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running.coverage_recorder import FOLDER, ROOT
from tests.running.coverage_records import IMPORT, combine, read_records
from tests.running.functions import parse

pytestmark = pytest.mark.full
TESTS = """\
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe import testing, text
from megapipe.launch.local import spawn

ROOT = Path({root!r})
PAGE = (ROOT / "docs/moe.md").read_text()


@pytest.fixture(scope="module")
def shared():
    return text.count_noun(1, "rank")


def test_alone(shared):
    assert text.ranges([1]) == "1"


def test_fixture(shared):
    assert (ROOT / "docs/data.md").read_text()


def test_world():
    assert len(testing.run_world(2, repr)) == 2


def test_fork():
    assert len(spawn(repr, 1)) == 1


def test_interpreter():
    code = "import os; from megapipe import text; text.join_or([1]); os._exit(0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_failure():
    text.nearest_multiples(4, 2)
    raise AssertionError
"""


def test_functions_that_processes_execute_are_recorded(tmp_path: Path) -> None:
    file, records = tmp_path / "test_recorded.py", tmp_path / "records"
    file.write_text(TESTS.format(root=str(ROOT)))
    records.mkdir()
    command = [sys.executable, "-m", "pytest", "-p", "tests.running.coverage_recorder"]
    command += ["-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), str(file)]
    environ = {**os.environ, FOLDER: str(records)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    recorded = combine(read_records(records))
    tests = {name.rpartition("::")[2]: test for name, test in recorded.tests.items()}
    functions = {}
    for name, test in tests.items():
        functions[name] = {
            function
            for path in ("megapipe/text.py", "megapipe/launch/local.py")
            for function, found in parse((ROOT / path).read_text()).functions.items()
            if found.body & test.lines.get(path, 0)
        }
    assert functions["test_alone"] == {"count_noun", "plural", "ranges"}
    assert functions["test_fixture"] == {"count_noun", "plural"}
    assert functions["test_interpreter"] == {"join_or", "_listed"}
    assert functions["test_failure"] == {"join_or", "_listed", "nearest_multiples"}
    assert functions["test_world"] == {
        *("World.__init__", "World.restart", "_collect", "_rank_main", "_ready", "run_ranks")
    }
    assert functions["test_fork"] == {*functions["test_world"], "spawn", "_context"}
    assert {"docs/moe.md", "docs/data.md"} <= tests["test_fixture"].opened
    assert "docs/data.md" not in tests["test_alone"].opened
    assert not any(name.startswith(IMPORT) for name in tests)
    assert not [path for path in records.glob("*/data.*") if "pid" not in path.name]
