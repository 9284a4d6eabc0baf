"""Mutation testing of the core: ``python tests/mutation/run.py --help``.

A seeded sample of small changes (:mod:`places`) is made in copies of the tree, one at a time, and
the tests that cover the file (:mod:`suites`) run on each. A mutant that they all pass has survived:
either a test is missing, or the change makes no difference. Exit code 1 if fewer than 95% of the
mutants are noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from places import Mutant, mutants_of
from suites import SUITES, Groups

ROOT = Path(__file__).parents[2]
TARGET = 0.95
PATIENCE, GRACE_S = 4.0, 30.0
"""A mutant hangs when its tests take this many times as long as without it, and so long on top."""
COPIED = ("megapipe", "tests", "benchmarks", "scripts", "configs", "docs")


@dataclass
class Trial:
    """A mutant of a file, and where its tests stand."""

    path: str
    mutant: Mutant
    groups: Groups
    at: int = 0


@dataclass
class Worker:
    """A copy of the tree in which one trial runs at a time."""

    tree: Path
    trial: Trial | None = None
    pid: int = 0
    deadline: float = 0.0
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.tree.with_suffix(".log")
        self.tree.mkdir()
        for name in COPIED:
            shutil.copytree(ROOT / name, self.tree / name, symlinks=True)
        for file in ROOT.iterdir():
            if file.is_file():
                shutil.copy(file, self.tree / file.name)

    def start(self, tests: tuple[str, ...], seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.pid = run_tests(self.tree, tests, self.log)

    def poll(self) -> int | None:
        """The exit code of pytest, or None while it runs; one that hangs is killed."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0 and time.monotonic() < self.deadline:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if pid == 0:
            os.waitpid(self.pid, 0)
            return -1
        return os.waitstatus_to_exitcode(status)


def run_tests(tree: Path, tests: tuple[str, ...], log: Path) -> int:
    """Run pytest in a fork of this process, which has loaded what does not change; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:0] = [str(tree)]
        sys.dont_write_bytecode = True
        import pytest

        chosen = ["-m", "not slow and not gpu"]
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *chosen, *tests]))
    finally:
        os._exit(code)


def preload() -> None:
    """What every test imports and no mutant changes."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed

    torch.set_num_threads(1)


def draw(count: int, seed: int, chosen: list[str]) -> list[Trial]:
    """About `count` mutants, as many of each file as its share of all places, 4 at least."""
    places = {path: mutants_of((ROOT / "megapipe" / path).read_bytes()) for path in chosen}
    total = sum(map(len, places.values()))
    trials = []
    for path, mutants in places.items():
        wanted = min(len(mutants), max(4, round(count * len(mutants) / total)))
        drawn = random.Random(f"{seed} {path}").sample(mutants, wanted)
        trials += [Trial(path, mutant, SUITES[path]) for mutant in drawn]
    random.Random(seed).shuffle(trials)
    return trials


def time_without(worker: Worker, groups: set[tuple[str, ...]]) -> dict[tuple[str, ...], float]:
    """Seconds that each group of tests takes on the tree as it is, where it has to pass."""
    seconds = {}
    for tests in sorted(groups):
        begin = time.monotonic()
        worker.start(tests, 1200.0)
        while (code := worker.poll()) is None:
            time.sleep(0.05)
        if code:
            sys.exit(f"without a mutant {' '.join(tests)} fails:\n{worker.log.read_text()}")
        seconds[tests] = time.monotonic() - begin
        print(f"{seconds[tests]:6.1f} s  {' '.join(tests)}", flush=True)
    return seconds


def run_trials(trials: list[Trial], workers: list[Worker]) -> list[Trial]:
    """The mutants that no test notices."""
    seconds = time_without(workers[0], {tests for trial in trials for tests in trial.groups})
    waiting, survivors, done = list(trials), [], 0

    def advance(worker: Worker) -> None:
        assert worker.trial is not None
        tests = worker.trial.groups[worker.trial.at]
        worker.start(tests, GRACE_S + PATIENCE * seconds[tests])

    while waiting or any(worker.trial for worker in workers):
        time.sleep(0.02)
        for worker in workers:
            if (trial := worker.trial) is None:
                if waiting:
                    worker.trial = trial = waiting.pop()
                    original = (ROOT / "megapipe" / trial.path).read_bytes()
                    file = worker.tree / "megapipe" / trial.path
                    file.write_bytes(trial.mutant.apply(original))
                    advance(worker)
                continue
            if (code := worker.poll()) is None:
                continue
            trial.at += 1
            if code == 0 and trial.at < len(trial.groups):
                advance(worker)
                continue
            done += 1
            verdict = "SURVIVED" if code == 0 else "killed" if code > 0 else "killed (hung)"
            print(f"{done}/{len(trials)} {verdict}: {trial.path}:{trial.mutant}", flush=True)
            if code == 0:
                survivors.append(trial)
            shutil.copy(ROOT / "megapipe" / trial.path, worker.tree / "megapipe" / trial.path)
            worker.trial = None
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help=f"below megapipe/ (all: {', '.join(SUITES)})")
    parser.add_argument("--count", type=int, default=320, help="mutants in all (320)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (2)")
    parser.add_argument("--list", action="store_true", help="print the sample, run nothing")
    given = parser.parse_args()
    if unknown := [path for path in given.files if path not in SUITES]:
        parser.error(f"no tests are named for {', '.join(unknown)}: expected {', '.join(SUITES)}")
    trials = draw(given.count, given.seed, given.files or list(SUITES))
    if given.list:
        for trial in trials:
            print(f"{trial.path}:{trial.mutant}")
        return 0
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = [Worker(Path(folder) / f"tree{i}") for i in range(given.jobs)]
        survivors = run_trials(trials, workers)
    tried, left = Counter(t.path for t in trials), Counter(t.path for t in survivors)
    for path, count in tried.items():
        print(f"{path}: {count - left[path]} of {count} noticed")
    for trial in survivors:
        print(f"survived: megapipe/{trial.path}:{trial.mutant}")
    share = 1 - len(survivors) / len(trials)
    print(f"{len(trials) - len(survivors)} of {len(trials)} noticed: {100 * share:.1f}%")
    return int(share < TARGET)


if __name__ == "__main__":
    sys.exit(main())
