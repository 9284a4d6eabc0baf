"""Records the tests and writes the map from files to tests: ``scripts/test.sh --map [FILE ...]``.

Without arguments it records all tests but those that are slow or need a GPU. With files of tests it
records these, and leaves the rest of the map as it is. Records are kept until the map is written:
after an interruption, the same command continues with the files that have no record.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.running.changes import tracked_files
from tests.running.coverage_recorder import FOLDER
from tests.running.coverage_records import combine, read_records
from tests.running.map_file import MAP, ROOT, load, save
from tests.running.map_order import build, is_test_file, update
from tests.running.processes import BY_FILE

RECORDS = ROOT / ".test_records"
MARKS = "not slow and not gpu"
NO_TESTS = 5
"""pytest's exit code where no test is selected."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return pytest's exit code. Tests that fail are recorded too."""
    parser = argparse.ArgumentParser(prog="scripts/test.sh --map", description=__doc__)
    parser.add_argument("files", nargs="*", help="files of tests (default: all)")
    parser.add_argument("--workers", type=int, default=3, help="processes of pytest (3)")
    given = parser.parse_args(argv)
    tracked = tracked_files()
    every = [file for file in tracked if is_test_file(file) and file.endswith(".py")]
    chosen = [os.path.relpath(Path(file).resolve(), ROOT) for file in given.files] or every
    if unknown := [file for file in chosen if file not in every]:
        parser.error(f"not a file of tests: {', '.join(unknown)}")
    RECORDS.mkdir(exist_ok=True)
    done = {record.file for record in read_records(RECORDS)}
    if left := [file for file in chosen if file not in done]:
        print(f"recording {len(left)} files of tests, {len(done)} are recorded", flush=True)
        status = _record(left, min(given.workers, len(left)))
    else:
        status = 0
    if status not in (0, 1, NO_TESTS):  # failures of tests, and nothing selected
        return status
    recorded = combine(read_records(RECORDS))
    for file in chosen:  # one may have slow tests alone
        recorded.shared_s.setdefault(file, 0.0)
    new = build(ROOT, tracked, recorded)
    known = load()
    for file in known.seconds.keys() - {*every}:  # it is gone
        del known.seconds[file]
    save(update(known, new) if given.files else new)
    shutil.rmtree(RECORDS)
    print(f"wrote {os.path.relpath(MAP)}: {len(recorded.tests)} tests recorded")
    return 0 if status == NO_TESTS else status


def _record(files: Sequence[str], workers: int) -> int:
    """Run files of tests with the recorder; return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.running.coverage_recorder", "-m", MARKS]
    command += ["-n", str(workers), *BY_FILE, "--continue-on-collection-errors"]
    environ = {**os.environ, FOLDER: str(RECORDS), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *files], cwd=ROOT, env=environ).returncode
