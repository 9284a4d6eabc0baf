"""The order of the tests of a function: there may be time for the first ones alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from tests.running.coverage_records import Recorded, Test
from tests.running.functions import parse
from tests.running.map_file import READ, SHARED, CoverageMap

MOST = 8
"""Largest number of tests that are named for a function."""
START_S = 0.1
"""Seconds that any test takes besides its own."""


def mirrors(test: str, file: str) -> bool:
    """Whether a test is in a file of tests that is named after a file, below a folder of tests or
    in the same room there."""
    tests, source = PurePosixPath(test.partition("::")[0]), PurePosixPath(file)
    return tests.name == f"test_{source.name}" and tests.parts[2:-1] in ((), source.parts[1:-1])


def order(file: str, body: int, tests: Mapping[str, Test]) -> list[str]:
    """Return the tests of a function, whose lines are `body`, the best first.

    First come those that together execute all lines of the function that any test executes, taken
    by lines per second, and those that mirror the file before others. Then come the ones that know
    little else than the file.
    """
    left = {name: lines for name, test in tests.items() if (lines := test.lines[file] & body)}

    def share(name: str) -> float:
        return tests[name].lines[file].bit_count() / tests[name].num_lines

    ordered: list[str] = []
    missing = body
    while len(ordered) < MOST:
        gains = {
            name: (mirrors(name, file), new.bit_count() / (tests[name].seconds + START_S))
            for name, lines in sorted(left.items())
            if (new := lines & missing)
        }
        if not gains:
            break
        ordered.append(max(gains, key=lambda name: gains[name]))
        missing &= ~left.pop(ordered[-1])
    rest = sorted(left, key=lambda name: (not mirrors(name, file), -share(name), name))
    return [*ordered, *rest][:MOST]


def build(root: Path, files: Iterable[str], recorded: Recorded) -> CoverageMap:
    """Build the map of the `files` below `root` from what was recorded."""
    seconds = {file: {SHARED: shared_s} for file, shared_s in recorded.shared_s.items()}
    executing: dict[str, dict[str, Test]] = defaultdict(dict)
    reading: dict[str, list[str]] = defaultdict(list)
    for name, test in recorded.tests.items():
        file, _, function = name.partition("::")
        seconds[file][function] = test.seconds
        for path in test.lines:
            executing[path][name] = test
        for path in test.opened:
            reading[path].append(name)
    tests: dict[str, dict[str, list[str]]] = {}
    for file in files:
        functions = {}
        if file.endswith(".py") and not is_test_file(file):
            functions = {
                name: ordered
                for name, function in parse((root / file).read_text("utf-8")).functions.items()
                if (ordered := order(file, function.body, executing[file]))
            }
        # first those that read many files, such as all of a kind
        readers = sorted(reading[file], key=lambda name: (-len(recorded.tests[name].opened), name))
        if readers and not is_test_file(file):
            functions[READ] = readers[:MOST]
        if functions or (file.endswith(".py") and not is_test_file(file)):
            tests[file] = functions
    return CoverageMap(seconds, tests)


def is_test_file(file: str) -> bool:
    """Whether pytest looks for tests in a file."""
    return file.startswith("tests/") and PurePosixPath(file).name.startswith("test_")


def update(known: CoverageMap, recorded: CoverageMap) -> CoverageMap:
    """Put what was recorded of some files of tests into a map, in place of what it says of them.

    Tests that the map names for a function stay where they are, if they still execute it and their
    file has seconds. New ones that mirror the file come before them, and others after them.
    """
    seconds = {**known.seconds, **recorded.seconds}
    tests: dict[str, dict[str, list[str]]] = {}
    for file, functions in recorded.tests.items():
        before = known.tests.get(file, {})
        tests[file] = {}
        for name in {**before, **functions}:
            new = functions.get(name, [])
            kept = [
                test
                for test in before.get(name, [])
                if test in new
                or test.partition("::")[0] in known.seconds.keys() - recorded.seconds.keys()
            ]
            first = [test for test in new if test not in kept and mirrors(test, file)]
            last = [test for test in new if test not in kept and test not in first]
            if merged := [*first, *kept, *last][:MOST]:
                tests[file][name] = merged
    return CoverageMap(seconds, tests)
