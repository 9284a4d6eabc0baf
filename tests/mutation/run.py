"""Mutation testing of the core: ``python tests/mutation/run.py --help``.

A seeded sample of small changes (:mod:`places`) is made in copies of the tree, one at a time, and
the tests that cover the file (:mod:`suites`) run on each. A mutant that they all pass has survived:
either a test is missing, or the change makes no difference. Exit code 1 if fewer than 95% of the
mutants are noticed.

A sample takes hours: with ``--verdicts FILE`` each verdict is added to a file, and a later run of
the same sample takes those of files that have not changed since from there.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutation_sites import Mutant, mutants_of
from suites import SUITES, Groups

ROOT = Path(__file__).parents[2]
TARGET = 0.95
PATIENCE, GRACE_S = 4.0, 30.0
"""Factor of the time without a mutant, and seconds on top, after which a mutant hangs."""
LONGEST_S = 1800.0
"""Seconds that a group of tests may take without a mutant."""
NOTHING = 5
"""pytest's exit code where no test is selected."""
SURVIVED = "SURVIVED"
COPIED = ("megapipe", "tests", "benchmarks", "examples", "scripts", "configs", "docs")


@dataclass
class Trial:
    """A mutant of a file, and where its tests stand."""

    path: str
    mutant: Mutant
    groups: Groups
    source: bytes
    """Source of the file without the mutant."""
    at: int = 0

    @property
    def key(self) -> str:
        """Name of the trial, the same in each run until the file changes."""
        digest = hashlib.sha256(self.source).hexdigest()
        return f"{digest[:16]} {self.path} {self.mutant.start} {self.mutant}"

    @property
    def tests(self) -> tuple[str, ...]:
        """Group of tests that comes next."""
        return self.groups[self.at]


@dataclass
class Worker:
    """A copy of the tree in which one trial runs at a time."""

    tree: Path
    trial: Trial | None = None
    changed: bool = False
    """Whether the tests that run see the trial's mutant, or are timed without."""
    pid: int = 0
    began: float = 0.0
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

    def start(self, patience: Mapping[tuple[str, ...], float]) -> None:
        """Begin the next group of the trial's tests, on the mutant if it is known for how many
        seconds to wait for them, else without it."""
        assert self.trial is not None
        trial = self.trial
        self.changed = trial.tests in patience
        source = trial.mutant.apply(trial.source) if self.changed else trial.source
        (self.tree / "megapipe" / trial.path).write_bytes(source)
        self.began = time.monotonic()
        self.deadline = self.began + patience.get(trial.tests, LONGEST_S)
        self.pid = run_tests(self.tree, trial.tests, self.log)

    def rest(self) -> None:
        """End the trial; the tree is as it was."""
        assert self.trial is not None
        (self.tree / "megapipe" / self.trial.path).write_bytes(self.trial.source)
        self.trial = None

    def poll(self) -> int | None:
        """Return the exit code of pytest, or None while it runs; one that hangs is killed."""
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
    """Run pytest in a fork of this process, which has loaded what does not change; return its
    pid."""
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
    """Import what every test imports and no mutant changes."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import torch.distributed

    torch.set_num_threads(1)


def draw(count: int, seed: int, chosen: list[str]) -> list[Trial]:
    """Draw about `count` mutants, from each file by its share of all places; at least 4 of each if
    `count` is enough for that, else 1."""
    sources = {path: (ROOT / "megapipe" / path).read_bytes() for path in chosen}
    places = {path: mutants_of(source) for path, source in sources.items()}
    total = sum(map(len, places.values()))
    least = max(1, min(4, count // len(places)))
    trials = []
    for path, mutants in places.items():
        wanted = min(len(mutants), max(least, round(count * len(mutants) / total)))
        drawn = random.Random(f"{seed} {path}").sample(mutants, wanted)
        trials += [Trial(path, mutant, SUITES[path], sources[path]) for mutant in drawn]
    random.Random(seed).shuffle(trials)
    return trials


def run_trials(trials: list[Trial], workers: list[Worker]) -> Iterator[tuple[Trial, str]]:
    """Yield each trial with its verdict, as it comes."""
    patience: dict[tuple[str, ...], float] = {}
    waiting = list(trials)
    while waiting or any(worker.trial for worker in workers):
        time.sleep(0.02)
        for worker in workers:
            if worker.trial is None:
                if waiting:
                    worker.trial = waiting.pop()
                    worker.start(patience)
                continue
            trial = worker.trial
            if (code := worker.poll()) is None:
                continue
            if not worker.changed:
                tests = " ".join(trial.tests)
                if code:
                    why = "selects nothing" if code == NOTHING else "fails"
                    sys.exit(f"without a mutant {tests} {why}:\n{worker.log.read_text()}")
                seconds = time.monotonic() - worker.began
                print(f"{seconds:6.1f} s  {tests}", flush=True)
                patience[trial.tests] = GRACE_S + PATIENCE * seconds
                worker.start(patience)
                continue
            trial.at += 1
            if code == 0 and trial.at < len(trial.groups):
                worker.start(patience)
                continue
            worker.rest()
            yield trial, SURVIVED if code == 0 else "killed" if code > 0 else "killed (hung)"


def known(file: Path | None) -> dict[str, str]:
    """Return the verdicts of earlier runs by the trials' keys."""
    if file is None or not file.exists():
        return {}
    lines = file.read_text(encoding="utf-8").splitlines()
    return dict(json.loads(line) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help=f"or folders below megapipe/: {', '.join(SUITES)}")
    parser.add_argument("--count", type=int, default=320, help="mutants in all (320)")
    parser.add_argument("--seed", type=int, default=0, help="of the sample (0)")
    parser.add_argument("--jobs", type=int, default=2, help="at a time (2)")
    parser.add_argument("--verdicts", type=Path, metavar="FILE", help="keep them, and take them up")
    parser.add_argument("--list", action="store_true", help="print the sample, run nothing")
    given = parser.parse_args()
    chosen = [path for path in SUITES if not given.files or path.startswith(tuple(given.files))]
    if unknown := [name for name in given.files if not any(p.startswith(name) for p in chosen)]:
        parser.error(f"no tests are named for {', '.join(unknown)}: expected {', '.join(SUITES)}")
    trials = draw(given.count, given.seed, chosen)
    if given.list:
        for trial in trials:
            print(f"{trial.path}:{trial.mutant}")
        return 0
    verdicts = known(given.verdicts)
    new = [trial for trial in trials if trial.key not in verdicts]
    print(f"{len(trials)} mutants, {len(trials) - len(new)} with a verdict", flush=True)
    preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workers = [Worker(Path(folder) / f"tree{i}") for i in range(given.jobs)]
        for done, (trial, verdict) in enumerate(run_trials(new, workers), 1):
            print(f"{done}/{len(new)} {verdict}: {trial.path}:{trial.mutant}", flush=True)
            verdicts[trial.key] = verdict
            if given.verdicts is not None:
                with given.verdicts.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([trial.key, verdict]) + "\n")
    survivors = [trial for trial in trials if verdicts[trial.key] == SURVIVED]
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
