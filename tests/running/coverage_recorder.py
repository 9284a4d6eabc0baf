"""A plugin of pytest that records what each test executes and reads, and how long it takes.

The processes that a test starts are included. Interpreters, and what they fork, are measured by
`coverage` itself, which an environment variable starts; servers that fork processes load
:mod:`tests.running.forked_coverage`. All of them write files into the folder of their worker. After
each file of tests, the worker adds a line to the records and removes these files.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sqlite3
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import coverage
import pytest

from tests.running.coverage_records import FIXTURE, IMPORT, Lines, Record

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "MEGAPIPE_RECORDS"
"""Environment variable: the folder of the records."""
NAME = "MEGAPIPE_RECORDED_TEST"
"""Environment variable: what processes that start now are recorded for."""
START = "COVERAGE_PROCESS_START"
"""Environment variable: the settings by which `coverage` starts with an interpreter."""
SETTINGS = """\
[run]
data_file = {folder}/data
parallel = true
context = ${{{name}}}
core = ctrace
patch = _exit
include =
    {root}/megapipe/*
    {root}/scripts/*
    {root}/benchmarks/*
    {root}/examples/*
    {root}/tests/*
    {root}/train.py
omit = */test_*.py, {root}/tests/running/*_recorder.py, {root}/tests/running/forked_*.py
"""


def pytest_configure(config: pytest.Config) -> None:
    """Record where tests run: in each worker, or in the one process."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        folder = Path(os.environ[FOLDER])
        config.pluginmanager.register(Recorder(folder, f"{os.getpid()}"))


class Recorder:
    """Records the tests that this process runs."""

    def __init__(self, folder: Path, worker: str) -> None:
        self._records = folder / f"{worker}.jsonl"
        self._data = folder / worker
        self._data.mkdir()
        self._data.chmod(0o777)  # processes that give up their privileges write there too
        settings = self._data / "settings"
        settings.write_text(SETTINGS.format(folder=self._data, name=NAME, root=ROOT))
        self._variables = {START: str(settings)}
        self._record = Record("")
        self._opened: dict[str, set[str]] = defaultdict(set)
        self._name = ""
        self._shared_s = 0.0
        os.environ.update({**self._variables, NAME: ""})
        started = coverage.process_startup()
        assert started is not None, "this process is recorded already"
        self._coverage = started
        self._wrap_servers()
        sys.addaudithook(self._hear)

    def _wrap_servers(self) -> None:
        """Have servers load the recorder of their forks, and not be measured themselves."""
        ensure_running = forkserver.ForkServer.ensure_running

        def ensure_recorded(server: Any) -> None:
            preload = ["tests.running.forked_coverage", *server._preload_modules]
            without = {key: value for key, value in os.environ.items() if key != START}
            with (
                mock.patch.object(server, "_preload_modules", preload),
                mock.patch.dict(os.environ, without, clear=True),
            ):
                ensure_running(server)

        setattr(forkserver.ForkServer, "ensure_running", ensure_recorded)  # noqa: B010
        # the module has it under this name too, bound to its own server
        forkserver.ensure_running = forkserver._forkserver.ensure_running

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        """Note the files of the repository that are opened or run, as an audit hook."""
        if event == "open":
            # an import opens the source where there is no compiled file yet
            imports = sys._getframe(1).f_code.co_filename.startswith("<frozen importlib")
            paths = [] if imports else [args[0]]
        elif event == "subprocess.Popen":
            paths = [args[0], *args[1]] if isinstance(args[1], list | tuple) else [args[0]]
        else:
            return
        for path in paths:
            if isinstance(path, str | Path):
                name = os.path.relpath(path, ROOT) if os.path.isabs(path) else str(path)
                if not name.startswith(("../", "/")) and not name.endswith(".pyc"):
                    self._opened[self._name].add(name)

    @contextlib.contextmanager
    def _recorded_as(self, name: str) -> Iterator[None]:
        """Record under this name in the block, and in processes that start there."""
        before = self._name
        self._switch(name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        self._name = os.environ[NAME] = name
        self._coverage.switch_context(name)
        # processes that are made from now on have a copy
        config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        config["recorded"] = {**self._variables, NAME: name}

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, object, object]:
        if not isinstance(collector, pytest.Module):
            return (yield)
        with self._recorded_as(f"{IMPORT}{collector.nodeid}"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        self._shared_s = 0.0
        began = time.monotonic()
        with self._recorded_as(item.nodeid):
            result = yield
        self._record.seconds[item.nodeid] = time.monotonic() - began - self._shared_s
        self._record.fixtures[item.nodeid] = [
            _name_of(definition)
            for definitions in item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
            for definition in definitions
            if definition.scope != "function"
        ]
        if nextitem is None or nextitem.path != item.path:
            self._end_of_file(item.nodeid.partition("::")[0])
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any]
    ) -> Generator[None, object, object]:
        if fixturedef.scope == "function":
            return (yield)
        name = _name_of(fixturedef)
        began, inner_s = time.monotonic(), self._shared_s
        try:
            with self._recorded_as(name):
                return (yield)
        finally:
            shared_s = time.monotonic() - began
            seconds = self._record.seconds
            seconds[name] = seconds.get(name, 0.0) + shared_s - (self._shared_s - inner_s)
            self._shared_s = inner_s + shared_s

    def _end_of_file(self, file: str) -> None:
        record, self._record = self._record, Record("")
        record.file = file
        self._coverage.save()
        local = Path(self._coverage.get_data().data_filename())
        executed = read_lines(local, {*record.seconds})  # it has those of earlier files too
        for path in self._data.glob("data.*"):
            if path != local:
                with contextlib.suppress(sqlite3.DatabaseError):  # its process was killed
                    add_lines(executed, read_lines(path))
                path.unlink()
        record.executed = {
            name: {path: f"{bits:x}" for path, bits in lines.items()}
            for name, lines in executed.items()
        }
        names = [*record.seconds, f"{IMPORT}{file}"]
        record.opened = {name: sorted(self._opened.pop(name, ())) for name in names}
        with self._records.open("a", encoding="utf-8") as out:
            out.write(json.dumps(vars(record)) + "\n")


def _name_of(definition: pytest.FixtureDef[Any]) -> str:
    return f"{FIXTURE}{definition.baseid}::{definition.argname}"


def add_lines(executed: dict[str, Lines], added: Mapping[str, Lines]) -> None:
    """Add lines to those that were executed, by test."""
    for name, lines in added.items():
        known = executed.setdefault(name, {})
        for path, bits in lines.items():
            known[path] = known.get(path, 0) | bits


def read_lines(data: Path, names: Collection[str] | None = None) -> dict[str, Lines]:
    """Return the lines in a file of `coverage` by what they were recorded for: all, or these
    `names`."""
    lines: dict[str, Lines] = {}
    with contextlib.closing(sqlite3.connect(data)) as database:
        for number, name in database.execute("select id, context from context").fetchall():
            if name and (names is None or name in names):
                query = (
                    "select file.path, line_bits.numbits from line_bits"
                    " join file on file.id = line_bits.file_id where line_bits.context_id = ?"
                )
                lines[name] = {
                    os.path.relpath(file, ROOT): int.from_bytes(bits, "little")
                    for file, bits in database.execute(query, [number])
                }
    return lines
