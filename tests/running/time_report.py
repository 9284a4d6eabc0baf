"""Where the last whole run spent its time: by kind, by file and by test."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.running.kinds import KINDS
from tests.running.processes import ROOT
from tests.running.record import TimedTest, WholeRun

PAGE = "docs/decisions/test_times.md"
MOST_PRINTED = 30
MOST_ON_PAGE = 20
PREFACE = """# Where the time of the tests goes

`scripts/test.sh --times` has written this page from the last whole run on one machine.
Seconds are of setup, call and teardown, summed over the workers, of which three share the cores;
so they are more than the run took. A test is of the first kind below that fits, by what it starts.
What a fixture of a file takes counts for the first test that needs it."""


@dataclass(frozen=True)
class Sum:
    """Tests that belong together: of a kind, or of a file."""

    name: str
    tests: int
    seconds: float


def main(file: str) -> int:
    """Print the report, write the page, and all times to `file` if it has a name."""
    run = WholeRun.last()
    if run is None:
        print("no whole run was recorded here yet; run scripts/test.sh", file=sys.stderr)
        return 2
    tests = run.record.tests
    print(headline(run))
    for row in by_kind(run):
        print(f"{row.seconds:9.1f} s {share(row, run):>6} {row.tests:>6} tests  {row.name}")
    print("the slowest files:")
    for row in by_file(tests)[:MOST_PRINTED]:
        print(f"{row.seconds:9.1f} s {row.tests:>6} tests  {row.name}")
    print("the slowest tests:")
    for test in slowest(tests)[:MOST_PRINTED]:
        print(f"{test.seconds:9.1f} s  {test.kind:<11}  {test.name}")
    (ROOT / PAGE).write_text(page(run), encoding="utf-8")
    if file:
        Path(file).write_text("".join(f"{line}\n" for line in table(tests)), encoding="utf-8")
    return 0


def headline(run: WholeRun) -> str:
    """Say which run it was."""
    phases = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.phases.items())
    return (
        f"`{run.tier}` at {run.commit} on {run.date}: {len(run.record.tests)} tests in "
        f"{sum(run.phases.values()):.0f} s on {run.cores} cores ({phases})"
    )


def by_kind(run: WholeRun) -> list[Sum]:
    """Sum up the tests of each kind, and before them the imports and collection of each worker."""
    imports = Sum("imports", 0, sum(run.record.ready_s))
    return [imports, *(_sum(k, [t for t in run.record.tests if t.kind == k]) for k in KINDS)]


def by_file(tests: Sequence[TimedTest]) -> list[Sum]:
    """Sum up the tests of each file, the longest first."""
    files: dict[str, list[TimedTest]] = {}
    for test in tests:
        files.setdefault(test.file, []).append(test)
    sums = [_sum(name, of_file) for name, of_file in files.items()]
    return sorted(sums, key=lambda row: -row.seconds)


def slowest(tests: Sequence[TimedTest]) -> list[TimedTest]:
    """Order the tests, the longest first."""
    return sorted(tests, key=lambda test: -test.seconds)


def share(row: Sum, run: WholeRun) -> str:
    """Return a row's share of the seconds of all workers."""
    return f"{row.seconds / (sum(each.seconds for each in by_kind(run)) or 1.0):.1%}"


def page(run: WholeRun) -> str:
    """Write the page of documentation."""
    meanings = {"imports": "imports and collection before the first test of a worker", **KINDS}
    kinds = [
        f"| {row.name} | {row.tests} | {row.seconds:.0f} | {share(row, run)} "
        f"| {meanings[row.name]} |"
        for row in by_kind(run)
    ]
    files = [
        f"| `{row.name}` | {row.tests} | {row.seconds:.0f} |"
        for row in by_file(run.record.tests)[:MOST_ON_PAGE]
    ]
    lines = [
        *(PREFACE, "", f"{headline(run)}.", ""),
        *(
            "| kind | tests | seconds | share | what its tests do |",
            "|---|---|---|---|---|",
            *kinds,
        ),
        *("", "The files that take longest:", ""),
        *("| file | tests | seconds |", "|---|---|---|", *files),
    ]
    return "\n".join([*lines, ""])


def table(tests: Sequence[TimedTest]) -> Iterator[str]:
    """Yield tab-separated lines: all files, then all tests."""
    yield "what\tname\tseconds\tkind\toutcome"
    for row in by_file(tests):
        yield f"file\t{row.name}\t{row.seconds:.3f}\t\t"
    for test in slowest(tests):
        yield f"test\t{test.name}\t{test.seconds:.3f}\t{test.kind}\t{test.outcome}"


def _sum(name: str, tests: Sequence[TimedTest]) -> Sum:
    return Sum(name, len(tests), sum(test.seconds for test in tests))
