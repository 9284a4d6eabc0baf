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
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.running import prose
from tests.running.changes import Changes, NoRepositoryError, changes_since
from tests.running.choice import Choice, choose
from tests.running.map_file import ROOT, CoverageMap, load
from tests.running.processes import BY_FILE
from tests.running.wanted import Wanted, wanted_tests

MARKS = "not slow and not gpu"
BUDGET_S = 150.0
"""Seconds that tests may take, so that all takes three minutes."""
WORKERS = 3
"""Processes of pytest: three for two cores, as one often waits."""
ALONE_S = 10.0
"""Seconds below which tests run in one process: others have to load torch first."""
START_S = 20.0
"""Seconds until the first test runs."""
BALANCE = 0.8
"""Smallest share of its time for which a worker has something to do."""
DEVICE_TESTS = "tests/fake_cuda/"
"""Where tests are that have to compile their device first, where that has not been done."""
NO_TESTS = 5
"""pytest's exit code where no test is selected."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0 if lint, types and tests pass. Other arguments go to pytest."""
    parser = argparse.ArgumentParser(prog="scripts/test.sh --changed", description=__doc__)
    parser.add_argument("--base", metavar="REF", help="compare with this (the main branch)")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, help=f"seconds for tests ({BUDGET_S:.0f})"
    )
    parser.add_argument("--list", action="store_true", help="name the tests, run nothing")
    given, options = parser.parse_known_args(argv)
    try:
        changes = changes_since(given.base)
    except NoRepositoryError as error:
        parser.error(str(error))
    if not changes.lines:
        print(f"nothing differs from {changes.base}")
        return 0
    known = load()
    wanted = wanted_of(known, changes)
    left_out = leave_out_device(wanted)
    choice = choose_within(known, wanted, given.budget)
    print(f"compared with {changes.base}:")
    for each in wanted:
        number = sum(test in choice.chosen for test in each.tests)
        print(f"  {each.file}: {number} of {len(each.tests)} {each.reason}")
    if left_out:
        print(f"  {left_out} of {DEVICE_TESTS} are left out: they would compile a device first")
    tests, files = len(choice.chosen), len(choice.files)
    print(f"tests: {tests}, in files: {files}, {choice.total_s:.0f} s of work", flush=True)
    if choice.left:
        every = choose(known, wanted, math.inf, math.inf)
        longest_s = max(every.total_s / WORKERS / BALANCE, *every.seconds.values())
        _print_left(choice.left, START_S + longest_s)
    if given.list:
        print("\n".join(choice.chosen))
        return 0
    return _run(choice, changes.lines, options)


def wanted_of(known: CoverageMap, changes: Changes) -> list[Wanted]:
    """Find the tests for each changed file."""
    return [wanted_tests(ROOT, known, file, lines) for file, lines in changes.lines.items()]


def leave_out_device(wanted: Sequence[Wanted]) -> int:
    """Take out the tests of a device that is not built; return how many these are."""
    if device_is_built():
        return 0
    number = 0
    for each in wanted:
        kept = [test for test in each.tests if not test.startswith(DEVICE_TESTS)]
        number += len(each.tests) - len(kept)
        each.tests = kept
    return number


def choose_within(known: CoverageMap, wanted: Sequence[Wanted], budget_s: float) -> Choice:
    """Choose the tests that all workers run within the given seconds."""
    longest_s = budget_s - START_S
    return choose(known, wanted, longest_s * WORKERS * BALANCE, longest_s)


def files_to_begin_with() -> list[str]:
    """Return the files with the tests of the change, the longest first; none without a
    repository."""
    try:
        changes = changes_since(None)
    except NoRepositoryError:
        return []
    known = load()
    return choose_within(known, wanted_of(known, changes), BUDGET_S).files


def device_is_built() -> bool:
    """Whether the tests for a device of type cuda find it built (tests/fake_cuda/build.py)."""
    return any(Path(sys.prefix, "share", "fake_cuda").glob("*.so"))


def _print_left(tests: Sequence[str], enough_s: float) -> None:
    counts = Counter(test.partition("::")[0] for test in tests)
    files = ", ".join(f"{file} ({count})" for file, count in counts.most_common())
    print(f"no time for other tests: {len(tests)}, in {files}")
    print(f"all run with: scripts/test.sh --changed --budget {enough_s:.0f}")


def _run(choice: Choice, files: Iterable[str], options: Sequence[str]) -> int:
    """Run lint, and types beside the chosen tests; return 0 if all pass."""
    began = time.monotonic()
    python = [sys.executable, "-m"]
    there = [file for file in files if (ROOT / file).exists()]
    sources, pages = ([file for file in there if file.endswith(end)] for end in (".py", ".md"))
    failed = []
    if sources:
        for command in (["ruff", "check"], ["ruff", "format", "--check"]):
            if subprocess.run([*python, *command, *sources], cwd=ROOT).returncode:
                failed.append(" ".join(command))
    if sources + pages and prose.main([str(ROOT / file) for file in (*sources, *pages)]):
        failed.append("prose")
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
    """Run the chosen tests; return pytest's exit code."""
    names = folder / "tests"
    names.write_text("\n".join(choice.chosen), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.running.selected"]
    command += ["--selected", str(names), "-m", MARKS]
    if choice.total_s > ALONE_S:
        workers = min(WORKERS, len(choice.files))
        command += ["-n", str(workers), *BY_FILE]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options, *choice.files], cwd=ROOT, env=environ).returncode
