"""The records of the tests (:mod:`tests.running.coverage_recorder`), put together."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

LONG_S = 10.0
"""Seconds above which each case of a test is a test by itself."""


FIXTURE = "fixture "
"""Prefix of the name of what is recorded for a fixture, which several tests may share."""
IMPORT = "import "
"""Prefix of the name of what is recorded while a file of tests is imported."""
Lines = dict[str, int]
"""File -> its executed lines: bit n is set for line n."""


@dataclass
class Record:
    """Everything recorded until the end of a file of tests."""

    file: str
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of each test, without its shared fixtures, and of each shared fixture."""
    fixtures: dict[str, list[str]] = field(default_factory=dict)
    """Test -> the shared fixtures that it uses."""
    opened: dict[str, list[str]] = field(default_factory=dict)
    """Test, fixture or import -> files of the repository that it opens or runs, but for Python's
    cache."""
    executed: dict[str, dict[str, str]] = field(default_factory=dict)
    """Test or fixture -> :data:`Lines`, in hexadecimal digits. An import is not among them: what it
    executes is more often registering than testing, and the first file that imports it has it."""


@dataclass
class Test:
    """A test function with all its cases, one case of it, or a fixture."""

    __test__ = False

    seconds: float = 0.0
    lines: Lines = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)

    def add(self, other: Test) -> None:
        """Add what a case, or a fixture of it, executes and opens."""
        for file, lines in other.lines.items():
            self.lines[file] = self.lines.get(file, 0) | lines
        self.opened |= other.opened

    @cached_property
    def num_lines(self) -> int:
        """Number of lines that are executed in all files, for a test that is complete."""
        return sum(lines.bit_count() for lines in self.lines.values())


@dataclass
class Recorded:
    """All tests that were recorded."""

    tests: dict[str, Test] = field(default_factory=dict)
    """The tests by name."""
    shared_s: dict[str, float] = field(default_factory=dict)
    """File of tests -> seconds of the fixtures that its tests share; a key for each file."""


def function_of(test: str) -> str:
    """Return the name of a test without its case."""
    return test.partition("[")[0]


def read_records(folder: Path) -> list[Record]:
    """Read what all workers have recorded; a last line that was cut short is left out."""
    records = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                records.append(Record(**json.loads(line)))
    return records


def combine(records: Iterable[Record]) -> Recorded:
    """Put the cases of tests together, with the fixtures that they use."""
    records = list(records)
    parts: dict[str, Test] = defaultdict(Test)
    for record in records:
        for name, lines in record.executed.items():
            parts[name].add(Test(lines={file: int(x, 16) for file, x in lines.items()}))
        for name, paths in record.opened.items():
            parts[name].add(Test(opened={*paths}))
    found = Recorded()
    for record in records:
        seconds = {n: s for n, s in record.seconds.items() if not n.startswith(FIXTURE)}
        totals: dict[str, float] = defaultdict(float)
        for case, case_s in seconds.items():
            totals[function_of(case)] += case_s
        found.shared_s[record.file] = sum(record.seconds.values()) - sum(seconds.values())
        for case, case_s in seconds.items():
            name = case if totals[function_of(case)] > LONG_S else function_of(case)
            test = found.tests.setdefault(name, Test())
            test.seconds += case_s
            for part in (case, *record.fixtures[case], f"{IMPORT}{record.file}"):
                test.add(parts[part])
    return found
