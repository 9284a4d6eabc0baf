"""Runs the tests marked `slow` file by file, and keeps the page of their last runs."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.running.other_systems import install_other_systems, install_solver
from tests.running.processes import ROOT
from tests.running.record import Record, pytest_recorded
from tests.running.revision import commit
from tests.running.whole_run import PASSED

PAGE = ROOT / "docs/decisions/slow_tests.md"
MARKS = "slow and not gpu"
NEVER = "not run since the list began"
PREFACE = """# Slow tests: when each file was run last

`scripts/test.sh --slow` has written this page. It runs the tests marked `slow`, one file after
the other, the longest not run first, or those of the files that it is given, and notes each result.
`scripts/test.sh --slow --list` runs nothing and brings the list of files up to date.

| file | slow tests | last run | commit | seconds | result |
|---|---|---|---|---|---|
"""
ROW = re.compile(r"^\| `(.+?)` \| (\d+) \| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Part:
    """A file with slow tests, and its last run: all empty where there was none."""

    file: str
    tests: int
    date: str = ""
    commit: str = ""
    seconds: str = ""
    result: str = NEVER

    def row(self) -> str:
        """Write it as a row of the table."""
        cells = (f"`{self.file}`", self.tests, self.date, self.commit, self.seconds, self.result)
        return f"| {' | '.join(map(str, cells))} |\n"


def main(files: Sequence[str], *, only_list: bool) -> int:
    """Run the slow tests of all files or of these; return 1 if one failed."""
    install_other_systems()
    install_solver()
    parts = update(read(PAGE), *collect())
    unknown = [file for file in files if file not in parts]
    if unknown:
        print(f"no slow tests in {' '.join(unknown)}", file=sys.stderr)
        return 2
    write(PAGE, parts)
    if only_list:
        return 0
    chosen = files or sorted(parts, key=lambda file: parts[file].date)
    failed = False
    for number, file in enumerate(chosen, 1):
        print(
            f"{number} of {len(chosen)}: {file} (last run: {parts[file].date or 'never'})",
            flush=True,
        )
        parts[file], passed = run(parts[file])
        failed |= not passed
        write(PAGE, parts)
    return int(failed)


def read(page: Path) -> dict[str, Part]:
    """Read the parts that a page lists."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    return {row[0]: Part(row[0], int(row[1]), *row[2:]) for row in ROW.findall(text)}


def write(page: Path, parts: dict[str, Part]) -> None:
    """Write the page anew."""
    rows = [parts[file].row() for file in sorted(parts)]
    page.write_text(PREFACE + "".join(rows), encoding="utf-8")


def collect() -> tuple[dict[str, int], set[str]]:
    """Count the slow tests of each file, and name the files that cannot be imported here."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-rs", "-m", MARKS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == PASSED, done.stdout + done.stderr
    found = re.findall(r"^(tests/\S+?\.py)::", done.stdout, re.MULTILINE)
    skipped = re.findall(r"^SKIPPED \[\d+\] (tests/\S+?\.py)", done.stdout, re.MULTILINE)
    return {file: found.count(file) for file in found}, set(skipped)


def update(known: dict[str, Part], counts: dict[str, int], skipped: set[str]) -> dict[str, Part]:
    """List the files that have slow tests now, with what is known of their last runs; those that
    cannot be imported here stay as they are."""
    parts = {file: part for file, part in known.items() if file in skipped}
    for file, tests in counts.items():
        parts[file] = replace(known.get(file, Part(file, tests)), tests=tests)
    return parts


def run(part: Part) -> tuple[Part, bool]:
    """Run the slow tests of a file; return its new row, and whether they passed."""
    began = time.monotonic()
    code, record = pytest_recorded("-m", MARKS, part.file)
    done = replace(
        part,
        date=time.strftime("%Y-%m-%d"),
        commit=commit(str(PAGE.relative_to(ROOT))),
        seconds=f"{time.monotonic() - began:.0f}",
        result=result(code, record),
    )
    return done, code == PASSED


def result(code: int, record: Record) -> str:
    """Say in a few words how the tests of a part ended."""
    if failed := record.failed:
        names = ", ".join(f"`{name.partition('::')[2]}`" for name in failed).replace("|", "\\|")
        return f"{len(failed)} failed: {names}"
    if code != PASSED:
        return f"pytest ended with exit code {code}"
    outcomes = [test.outcome for test in record.tests]
    skipped = outcomes.count("skipped")
    return f"{outcomes.count('passed')} passed" + f", {skipped} skipped" * bool(skipped)
