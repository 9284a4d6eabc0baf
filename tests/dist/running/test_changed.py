"""The tests of a change run for real, in a small repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running.map_file import ROOT, CoverageMap, save

pytestmark = pytest.mark.full
COMMAND = """
import sys
from pathlib import Path
from tests.running import changed, changes, map_file, revision
root = Path.cwd()
changed.ROOT = changes.ROOT = revision.ROOT = root
changed.load = lambda: map_file.load(root / "map.json")
sys.exit(changed.main(sys.argv[1:]))
"""
FILES = {
    "parts.py": "def one() -> int:\n    return 1\n\n\ndef two() -> int:\n    return 2\n",
    "tests/test_parts.py": """\
import parts


def test_one() -> None:
    assert parts.one() == 1


def test_two() -> None:
    assert parts.two() == 2
""",
    "pyproject.toml": """\
[tool.mypy]
files = ["parts.py"]
[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "--import-mode=importlib"
markers = ["slow", "gpu"]
""",
}
ENVIRON = {
    **{f"GIT_{name}_NAME": "a" for name in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{name}_EMAIL": "a@example.org" for name in ("AUTHOR", "COMMITTER")},
    "PYTHONPATH": str(ROOT),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make a repository with a file, its tests and their map, all committed."""
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    test = "tests/test_parts.py"
    functions = {name: [f"{test}::test_{name}"] for name in ("one", "two")}
    seconds = {"": 0.0, "test_one": 0.1, "test_two": 0.1}
    save(CoverageMap({test: seconds}, {"parts.py": functions}), tmp_path / "map.json")
    for command in ("init -q -b main", "add -A", "commit -qm one"):
        subprocess.run(
            ["git", *command.split()], cwd=tmp_path, check=True, env={**os.environ, **ENVIRON}
        )
    return tmp_path


@pytest.mark.parametrize(
    ("text", "code", "outcome"),
    [
        ("    return 1 + 0\n", 0, "passed, in"),
        ("    return 3\n", 1, "failed: tests, in"),
        ("    return  1\n", 1, "failed: ruff format --check, in"),
        ('    return ""\n', 1, "failed: tests, types, in"),
        ("    return wrong\n", 1, "failed: ruff check, tests, types, in"),
    ],
)
def test_a_change_is_judged_by_lint_types_and_its_tests(
    root: Path, text: str, code: int, outcome: str
) -> None:
    (root / "parts.py").write_text(FILES["parts.py"].replace("    return 1\n", text))
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "--base", "main"],
        cwd=root,
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "  parts.py: 1 of 1 tests that execute one function"
    assert lines[-1].startswith(outcome), done.stdout + done.stderr
    assert ("1 passed, 1 deselected" in done.stdout) is ("tests" not in outcome)
