"""A whole run: what most often fails comes first, what load could break comes last.

1. Lint, imports under the lowest Python and links of the documents, with types beside all that
   follows. A failure ends the run; if types fail, it ends there and then.
2. The tests on three workers, first the files with those that `--changed` would run.
3. The tests marked `deadline`, one after the other with nothing beside them.
4. What has failed, once more, alone: this shows whether it fails again, and changes nothing.
5. With all that CI runs: a training under the lowest and the highest Python of the machine, and one
   with the lowest packages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tests.running import lowest_packages, lowest_python, processes, python_versions
from tests.running.changed import files_to_begin_with
from tests.running.other_systems import install_other_systems, install_solver
from tests.running.processes import BY_FILE, Types
from tests.running.record import Record, WholeRun, pytest_recorded
from tests.running.revision import commit

DEFAULT = "not slow and not gpu and not full"
FULL = "not slow and not gpu"
WORKERS = ("-n", "3", *BY_FILE, "--durations=30")
"""Options for three workers on two cores, as one often waits for a deadline. The long files, of
several processes, come first."""
LINKS = ("-q", "-k", "links", "tests/unit/test_docs.py", "tests/unit/test_guides.py")
MOST_AGAIN = 20
"""Number of failed tests that are run once more."""
PASSED, NOTHING_SELECTED = 0, 5
"""Exit codes of pytest."""


class Phases:
    """The phases of a run: the seconds of each, and which failed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._failed: list[str] = []

    def run(self, name: str, passes: Callable[[], bool]) -> bool:
        """Run a phase and return whether it passed."""
        began = time.monotonic()
        passed = passes()
        self.seconds[name] = time.monotonic() - began
        if not passed:
            self._failed.append(name)
        return passed

    def end(self) -> int:
        """Print all phases, and return the exit code of the run."""
        for name, seconds in self.seconds.items():
            outcome = "failed" if name in self._failed else "passed"
            print(f"{name:<15} {seconds:7.1f} s  {outcome}", flush=True)
        return int(bool(self._failed))


def run_all(*, full: bool, pytest_options: Sequence[str]) -> int:
    """Run lint, types and all tests of a tier; return the exit code."""
    phases = Phases()
    with Types.started() as types:
        if (
            phases.run("lint", lint)
            and phases.run("lowest Python", lowest_python.check)
            and phases.run("links", lambda: processes.run("pytest", *LINKS) == PASSED)
        ):
            if full:
                install_other_systems()
                install_solver()
            _run_tests(phases, types, full, pytest_options)
            if full:
                phases.run("other Pythons", python_versions.check)
                phases.run("lowest packages", lowest_packages.check)
            phases.run("types", types.end)
    return phases.end()


def run_some(arguments: Sequence[str], *, full: bool) -> int:
    """Run lint, and then pytest with these arguments in one process, beside types."""
    with Types.started() as types:
        if not lint():
            return 1
        if full:
            install_other_systems()
            install_solver()
        code = processes.run("pytest", *arguments)
        return code if types.end() else code or 1


def lint() -> bool:
    """Whether all files pass ruff, are formatted by it, and keep the rules of style for prose."""
    commands = (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["tests.running.prose"])
    return all(processes.run(*command) == 0 for command in commands)


def _run_tests(phases: Phases, types: Types, full: bool, options: Sequence[str]) -> None:
    """Run the tests of a tier, unless types fail before they end, and keep the record."""
    record, marks = Record(), FULL if full else DEFAULT

    def passes(marks: str, *arguments: str) -> bool:
        given = ("-m", marks, *arguments, *options)
        code, recorded = pytest_recorded(*given, until=types.failed)
        record.add(recorded)
        return code in (PASSED, NOTHING_SELECTED)

    first = [word for name in files_to_begin_with() for word in ("--first", name)]
    phases.run("tests", lambda: passes(f"{marks} and not deadline", *WORKERS, *first))
    if record.alone and not types.failed():
        alone = tuple(record.alone)  # no other file has to be imported
        phases.run("deadlines", lambda: passes(f"{marks} and deadline", *alone))
    if types.failed():
        return
    tier = "scripts/test.sh --full" if full else "scripts/test.sh"
    WholeRun(tier, commit(), phases.seconds, record).save()
    if failed := record.failed[:MOST_AGAIN]:
        print("the run has failed; once more, alone, to show what fails again:", flush=True)
        print(*failed, sep="\n", flush=True)
        again = ("-m", marks, *failed, *options)
        phases.run("once more", lambda: processes.run("pytest", *again, until=types.failed) == 0)
