"""The map from the files of the repository to the tests that run when they change.

It is a file of the repository, ``map.json``, with a line for each test, and for the functions of a
file that have the same tests. It names a test by a few characters of a hash, so that a line stays
as it is while other tests come and go.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAP = Path(__file__).with_name("map.json")
SHARED = ""
"""Key in place of a test: the fixtures that several tests of a file share."""
READ = ""
"""Key in place of a function: the file is opened, not executed."""


@dataclass
class CoverageMap:
    """Tests by the functions that they execute, and their seconds."""

    seconds: dict[str, dict[str, float]]
    """File of tests -> test -> its seconds. A test is a function, or one of its cases where all of
    them take long."""
    tests: dict[str, dict[str, list[str]]]
    """File -> function -> tests that execute it, those to run first at the front. Each is named
    after its file, as in pytest."""


def digest(test: str) -> str:
    """Return the name of a test in the lines of the map."""
    return base64.urlsafe_b64encode(hashlib.blake2s(test.encode()).digest())[:5].decode()


def load(path: Path = MAP) -> CoverageMap:
    """Read the map; empty where there is none."""
    if not path.exists():
        return CoverageMap({}, {})
    stored = json.loads(path.read_text(encoding="utf-8"))
    names = defaultdict(list)
    for file, tests in stored["seconds"].items():
        for name in tests:
            names[digest(f"{file}::{name}")].append(f"{file}::{name}")
    return CoverageMap(
        stored["seconds"],
        {
            file: {
                function: [name for key in keys.split() for name in names[key]]
                for functions_of_line, keys in lines.items()
                for function in functions_of_line.split(" ")
            }
            for file, lines in stored["tests"].items()
        },
    )


def save(content: CoverageMap, path: Path = MAP) -> None:
    """Write the map, in alphabetical order but for the tests of a function."""
    stored: Mapping[str, object] = {
        "seconds": {
            file: {name: float(f"{seconds:.2g}") for name, seconds in tests.items()}
            for file, tests in content.seconds.items()
        },
        "tests": {
            file: {
                " ".join(names): " ".join(digest(test) for test in tests)
                for tests, names in _by_tests(functions).items()
            }
            for file, functions in content.tests.items()
        },
    }
    text = json.dumps(stored, indent=0, sort_keys=True, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _by_tests(functions: Mapping[str, list[str]]) -> dict[tuple[str, ...], list[str]]:
    """Group the names of functions that have the same tests, in alphabetical order."""
    names: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in sorted(functions):
        names[tuple(functions[name])].append(name)
    return names
