"""A plugin of pytest: how long each test took, of which kind it is, and whether it passed.

`-p tests.running.times --record FILE` writes that to FILE when the session ends. Each worker
measures, and its reports carry the kinds to the process that writes. `--first FILE` has the tests
of a file run before all others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.running.kinds import Lists, Starts, kind_of

LOADED = time.perf_counter()
"""When this process began, but for pytest itself."""
READY, ALONE = "megapipe_ready_s", "megapipe_alone"
KIND = "megapipe_kind"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of the plugin."""
    group = parser.getgroup("running")
    group.addoption("--record", type=Path, required=True, help="write times and outcomes to FILE")
    group.addoption("--first", action="append", default=[], help="begin with the tests of FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Measure where tests run, and record where reports arrive: by default the same process."""
    if not config.getoption("numprocesses", None):
        config.pluginmanager.register(Meter(config), "megapipe-meter")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("record")), "megapipe-recorder")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of the files that were named before all others."""
    first = {config.rootpath / name for name in config.getoption("first")}
    items.sort(key=lambda item: item.path not in first)


class Meter:
    """Measures a process that runs tests."""

    def __init__(self, config: pytest.Config) -> None:
        self.output: dict[str, Any] = getattr(config, "workeroutput", {})
        self._starts = Starts()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Name the files that have tests for the end of the run."""
        files = {item.nodeid.partition("::")[0] for item in items if _is_late(item)}
        self.output[ALONE] = sorted(files.union(self.output.get(ALONE, [])))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note how long imports and collection took."""
        self._lists = Lists(session.items)
        self._starts.take()
        self.output[READY] = time.perf_counter() - LOADED

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the kind to the last report of a test."""
        if call.when == "teardown":
            kind = kind_of(item, self._starts.take(), self._lists)
            item.user_properties.append((KIND, kind))
        return (yield)

    def pytest_unconfigure(self) -> None:
        """Leave no file behind."""
        self._starts.close()


def _is_late(item: pytest.Item) -> bool:
    return item.get_closest_marker("deadline") is not None


class Recorder:
    """Collects what all processes report, and writes it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tests: dict[str, dict[str, Any]] = {}
        self._processes: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a part of a test: its setup, its call or its teardown."""
        test = self._tests.setdefault(
            report.nodeid, {"seconds": 0.0, "kind": "plain", "outcome": "passed"}
        )
        test["seconds"] += report.duration
        if report.outcome != "passed" and test["outcome"] != "failed":
            test["outcome"] = report.outcome
        test["kind"] = dict(report.user_properties).get(KIND, test["kind"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take what a worker has measured, if it has lived to the end."""
        self._processes.append(getattr(node, "workeroutput", {}))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the record."""
        meter = session.config.pluginmanager.get_plugin("megapipe-meter")
        outputs = self._processes if meter is None else [meter.output]
        ready_s = [output[READY] for output in outputs if READY in output]
        alone = {file for output in outputs for file in output.get(ALONE, [])}
        written = {"tests": self._tests, "ready_s": ready_s, "alone": sorted(alone)}
        self._file.write_text(json.dumps(written))
