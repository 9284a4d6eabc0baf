"""Whole runs of a small tree of tests, and what they record (tests/running)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parity.jobs import Job
from tests.running import lowest_python, slow

ROOT = Path(__file__).parents[3]
LINKS = "def test_links() -> None:\n    pass\n"
ENVIRON = {name: of for name, of in os.environ.items() if not name.startswith("PYTEST_XDIST")}
"""Environment of a command, which is not a worker's."""
TREE = {
    "train.py": "import os\n\nstep: int = os.getpid()\n",
    "tests/unit/test_docs.py": LINKS,
    "tests/unit/test_guides.py": LINKS,
    "tests/fake_cuda/test_device.py": "def test_stand_in() -> None:\n    pass\n",
    "tests/unit/test_starts.py": '''
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = str(Path(__file__).with_name("g++"))


def test_plain() -> None:
    assert "PYTEST_XDIST_WORKER" in os.environ


def test_job() -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def test_compilation() -> None:
    subprocess.run([COMPILER], check=True)


def in_rank(*command: str) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([])
    rank = context.Process(target=subprocess.run, args=(command,))
    rank.start()
    rank.join()
    assert rank.exitcode == 0


def test_world() -> None:
    in_rank("true")


def test_compilation_of_a_rank() -> None:
    in_rank(COMPILER)


@pytest.mark.parametrize("number", range(21))
def test_list(number: int) -> None:
    assert number < 21


@pytest.mark.full
def test_of_ci() -> None:
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize("passes", [True, False])
def test_slow(passes: bool) -> None:
    assert passes
'''.lstrip(),
    "tests/unit/test_late.py": '''
import os
from pathlib import Path

import pytest


@pytest.mark.deadline
def test_alone() -> None:
    assert "PYTEST_XDIST_WORKER" not in os.environ


def test_fails_once() -> None:
    mark = Path(__file__).with_suffix(".mark")
    failed_before = mark.exists()
    mark.touch()
    assert failed_before
'''.lstrip(),
}  # fmt: skip
KINDS = {
    "test_stand_in": "stand-in",
    "test_plain": "plain",
    "test_job": "job",
    "test_compilation": "compilation",
    "test_world": "world",
    "test_compilation_of_a_rank": "compilation",
    "test_list[20]": "list",
    "test_fails_once": "plain",
    "test_alone": "plain",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a repository with a few tests, and the runner."""
    shutil.copytree(ROOT / "tests/running", tmp_path / "tests/running")
    settings = (ROOT / "pyproject.toml").read_text()
    few = re.sub(r'^files = \["megapipe".*', 'files = ["train.py"]', settings, flags=re.MULTILINE)
    for name, text in {**TREE, "pyproject.toml": few}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    compiler = tmp_path / "tests/unit/g++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    (tmp_path / "docs/decisions").mkdir(parents=True)
    shutil.copy(ROOT / "docs/glossary.md", tmp_path / "docs/glossary.md")
    return tmp_path


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the runner as scripts/test.sh does; nothing is installed."""
    return subprocess.run(
        [sys.executable, "-m", "tests.running", *arguments],
        cwd=tree,
        env={**ENVIRON, "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.full
def test_a_whole_run_is_recorded_and_a_failure_stays_one(tree: Path) -> None:
    none = run(tree, "--times")
    assert (none.returncode, none.stderr.count("\n")) == (2, 1)
    done = run(tree)
    assert done.returncode == 1, done.stdout + done.stderr
    _, again, after = done.stdout.partition("once more, alone")
    assert again
    assert "1 passed" in after
    ended = dict(re.findall(r"^(\w[\w ]+?) +[\d.]+ s  (\w+)$", after, re.MULTILINE))
    failed = {"tests": "failed", "deadlines": "passed", "once more": "passed", "types": "passed"}
    assert ended == {"lint": "passed", "lowest Python": "passed", "links": "passed", **failed}
    times = run(tree, "--times", "times.tsv")
    assert times.returncode == 0, times.stderr
    rows = [line.split("\t") for line in (tree / "times.tsv").read_text().splitlines()]
    tests = {row[1].partition("::")[2]: row for row in rows if row[0] == "test"}
    assert {name: tests[name][3] for name in KINDS} == KINDS
    assert {name for name, row in tests.items() if row[4] == "failed"} == {"test_fails_once"}
    assert "test_of_ci" not in tests
    assert "| list | 21 | " in (tree / "docs/decisions/test_times.md").read_text()


SLEEPS = """
import multiprocessing
import time
from pathlib import Path


def test_sleeps() -> None:
    rank = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    rank.start()
    Path(__file__).with_suffix(".mark").touch()
    rank.join()
""".lstrip()


@pytest.mark.full
def test_an_interrupt_leaves_no_process(tree: Path) -> None:
    """The signal comes to the runner alone; a worker of pytest waits for a rank."""
    file = tree / "tests/unit/test_sleeps.py"
    file.write_text(SLEEPS)
    with Job(tree) as job:
        runner = job.start(["-m", "tests.running"], cwd=tree)
        while not file.with_suffix(".mark").exists():
            assert runner.poll() is None, job.text
            time.sleep(0.1)
        runner.send_signal(signal.SIGINT)
        assert job.end().codes == [130]


@pytest.mark.full
def test_slow_tests_are_noted_file_by_file(tree: Path) -> None:
    listed = run(tree, "--slow", "--list")
    assert listed.returncode == 0, listed.stderr
    (part,) = slow.read(tree / slow.PAGE.relative_to(ROOT)).values()
    assert part == slow.Part("tests/unit/test_starts.py", 2)
    done = run(tree, "--slow")
    assert done.returncode == 1, done.stderr
    assert "1 of 1: tests/unit/test_starts.py (last run: never)" in done.stdout
    (part,) = slow.read(tree / slow.PAGE.relative_to(ROOT)).values()
    assert part.date
    assert (part.commit, part.result) == ("no commit", "1 failed: `test_slow[False]`")
    assert run(tree, "--slow", "tests/unit/test_late.py").returncode == 2


@pytest.mark.slow
def test_the_page_of_slow_tests_lists_all_files_that_have_some() -> None:
    counts, skipped = slow.collect()
    listed = set(slow.read(slow.PAGE))
    assert listed - skipped == set(counts) - skipped, "scripts/test.sh --slow --list mends it"


def test_what_the_lowest_python_lacks_is_found(tree: Path) -> None:
    here = sys.version_info[:2]
    assert lowest_python.mistakes(tree, here) == []
    (tree / "scripts").mkdir()
    file = tree / "scripts/new.py"
    file.write_text("from typing import Self, Newer\n")
    assert lowest_python.mistakes(tree, here) == [f"{file}:1: there is no typing.Newer"]
    assert lowest_python.mistakes(tree, (99, 0)) is None
