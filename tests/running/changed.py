"""Lint, types and tests of what differs from the main branch: ``scripts/test.sh --changed``.

The tests are chosen by a map that was recorded (``scripts/test.sh --map``).
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megapipe.words import counted
from tests.running.changes import changes_since
from tests.running.choice import Choice, choose
from tests.running.map_file import ROOT, load
from tests.running.wanted import wanted_tests

MARKS = "not slow and not gpu"
WORKERS = 3
"""Processes of pytest: three for two cores, as one often waits."""
ALONE_S = 10.0
"""Tests that take less run in one process: others have to load torch first."""
START_S = 20.0
"""Until the first test runs."""
BALANCE = 0.8
"""The share of its time for which a worker has something to do, at least."""
DEVICE_TESTS = "tests/fake_cuda/"
"""Where tests are that have to compile their device first, where that has not been done."""
NO_TESTS = 5
"""pytest's exit code where no test is selected."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 if lint, types and tests pass. Other arguments go to pytest."""
    parser = argparse.ArgumentParser(prog="scripts/test.sh --changed", description=__doc__)
    parser.add_argument("--base", metavar="REF", help="compare with this (the main branch)")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds for tests (150)")
    parser.add_argument("--list", action="store_true", help="name the tests, run nothing")
    given, options = parser.parse_known_args(argv)
    changes = changes_since(given.base)
    if not changes.lines:
        print(f"nothing differs from {changes.base}")
        return 0
    known = load()
    wanted = [wanted_tests(ROOT, known, file, lines) for file, lines in changes.lines.items()]
    if not device_is_built():
        for each in wanted:
            each.tests = [test for test in each.tests if not test.startswith(DEVICE_TESTS)]
    longest_s = given.budget - START_S
    choice = choose(known, wanted, longest_s * WORKERS * BALANCE, longest_s)
    print(f"compared with {changes.base}:")
    for each in wanted:
        number = sum(test in choice.chosen for test in each.tests)
        print(f"  {each.file}: {number} of {len(each.tests)} {each.reason}")
    tests, files = counted(len(choice.chosen), "test"), counted(len(choice.files), "file")
    print(f"{tests} of {files}, {choice.total_s:.0f} s of work", flush=True)
    if choice.left:
        every = choose(known, wanted, math.inf, math.inf)
        longest_s = max(every.total_s / WORKERS / BALANCE, *every.seconds.values())
        _print_left(choice.left, START_S + longest_s)
    if given.list:
        print("\n".join(choice.chosen))
        return 0
    return _run(choice, [file for file in changes.lines if file.endswith(".py")], options)


def device_is_built() -> bool:
    """Whether the tests for a device of type cuda find it built (tests/fake_cuda/build.py)."""
    return any(Path(sys.prefix, "share", "fake_cuda").glob("*.so"))


def _print_left(tests: Sequence[str], enough_s: float) -> None:
    counts = Counter(test.partition("::")[0] for test in tests)
    files = ", ".join(f"{file} ({count})" for file, count in counts.most_common())
    print(f"no time for {counted(len(tests), 'other test')}: {files}")
    print(f"all run with: scripts/test.sh --changed --budget {enough_s:.0f}")


def _run(choice: Choice, files: Sequence[str], options: Sequence[str]) -> int:
    """Run lint, and types beside the chosen tests; returns 0 if all pass."""
    began = time.monotonic()
    python = [sys.executable, "-m"]
    sources = [file for file in files if (ROOT / file).exists()]
    failed = []
    if sources:
        for command in (["ruff", "check"], ["ruff", "format", "--check"]):
            if subprocess.run([*python, *command, *sources], cwd=ROOT).returncode:
                failed.append(" ".join(command))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "types"
        with report.open("w") as out:
            mypy = subprocess.Popen([*python, "mypy"], cwd=ROOT, stdout=out, stderr=out)
        if choice.chosen and _run_tests(choice, Path(folder), options) not in (0, NO_TESTS):
            failed.append("tests")
        if mypy.wait():
            failed.append("types")
        print(report.read_text(), end="")
    outcome = f"failed: {', '.join(failed)}" if failed else "passed"
    print(f"{outcome}, in {time.monotonic() - began:.0f} s")
    return int(bool(failed))


def _run_tests(choice: Choice, folder: Path, options: Sequence[str]) -> int:
    """Run the chosen tests; returns pytest's exit code."""
    names = folder / "tests"
    names.write_text("\n".join(choice.chosen), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.running.selected"]
    command += ["--selected", str(names), "-m", MARKS]
    if choice.total_s > ALONE_S:
        workers = min(WORKERS, len(choice.files))
        command += ["-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options, *choice.files], cwd=ROOT, env=environ).returncode
