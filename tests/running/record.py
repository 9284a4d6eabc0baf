"""What is known of the last whole run: where its time went, and which of its tests failed."""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.running import processes
from tests.running.processes import ROOT

LAST = ROOT / ".pytest_cache/last_whole_run.json"


@dataclass(frozen=True)
class TimedTest:
    """A test that was run."""

    name: str
    seconds: float
    kind: str
    """One of :data:`tests.running.kinds.KINDS`."""
    outcome: str
    """Outcome: passed, failed or skipped."""

    @property
    def file(self) -> str:
        """File that the test is in."""
        return self.name.partition("::")[0]


@dataclass
class Record:
    """Tests that were run, and what was spent beside them."""

    tests: list[TimedTest] = field(default_factory=list)
    ready_s: list[float] = field(default_factory=list)
    """Seconds of imports and collection, for each process that ran tests."""
    alone: list[str] = field(default_factory=list)
    """Files with tests marked `deadline` that were not selected."""

    @property
    def failed(self) -> list[str]:
        """Names of the tests that failed."""
        return [test.name for test in self.tests if test.outcome == "failed"]

    def add(self, other: Record) -> None:
        """Take in what another session of pytest has recorded."""
        self.tests += other.tests
        self.ready_s += other.ready_s
        self.alone += other.alone


@dataclass
class WholeRun:
    """A whole run: of what, on what, and what it recorded."""

    tier: str
    commit: str
    phases: dict[str, float]
    """Phase -> seconds."""
    record: Record
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    cores: int = field(default_factory=lambda: os.cpu_count() or 1)

    def save(self) -> None:
        """Keep the run as the last one."""
        LAST.parent.mkdir(exist_ok=True)
        LAST.write_text(json.dumps(asdict(self)))

    @classmethod
    def last(cls) -> WholeRun | None:
        """Read the last one, if there was any."""
        if not LAST.exists():
            return None
        kept = json.loads(LAST.read_text())
        record = kept.pop("record")
        tests = [TimedTest(**test) for test in record.pop("tests")]
        return cls(**kept, record=Record(tests, **record))


def pytest_recorded(
    *arguments: str, until: processes.Condition = processes.never
) -> tuple[int, Record]:
    """Run pytest; return its exit code and what it recorded, which is nothing if it was ended."""
    with tempfile.TemporaryDirectory(prefix="megapipe-record-") as folder:
        file = Path(folder) / "record.json"
        options = ("-p", "tests.running.times", "--record", str(file))
        code = processes.run("pytest", *options, *arguments, until=until)
        return code, _read(file) if file.exists() else Record()


def _read(file: Path) -> Record:
    written = json.loads(file.read_text())
    tests = [TimedTest(name, **measured) for name, measured in written.pop("tests").items()]
    return Record(tests, **written)
