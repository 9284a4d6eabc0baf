"""A training, and tests of what reads models and texts, with the lowest versions of packages that
pyproject.toml declares.

They lie in a folder that a process puts first on its path. torch is the one of the environment: its
lowest version would bring gigabytes.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

from tests.running.processes import ROOT
from tests.running.python_versions import INSTALL, done, runs, told

FOLDER = Path(sys.prefix) / "lowest-packages"
LIST = "megapipe.txt"
"""File of a complete folder: the names and versions that were asked for."""
TESTS = (
    *("tests/unit/data/test_corpus.py", "tests/unit/data/test_parts.py"),
    *("tests/unit/data/test_tokenizer.py", "tests/unit/convert/test_convert_command.py"),
    *("tests/unit/convert/test_tokenizer.py", "tests/unit/model/test_hf.py"),
    *("tests/unit/config/test_config.py", "tests/unit/test_cli.py", "tests/unit/observe"),
    "tests/dist/test_class_models.py",
)


def declared(root: Path = ROOT) -> list[str]:
    """Read the lowest version of each package but torch, as pip takes them."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    for given in project["dependencies"]:
        match = re.match(r"([\w-]+)>=([\d.]+\d)", given)
        assert match is not None, f"{given}: expected a lowest version"
        if match[1] != "torch":
            found.append(f"{match[1]}=={match[2]}")
    return found


def check() -> bool:
    """Print whether the training and the tests passed, and return it."""
    if not _installed(declared()):
        print("the lowest packages were not tried: they cannot be installed", flush=True)
        return True
    path = {"PYTHONPATH": str(FOLDER)}
    tests = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    passed = told("lowest packages: all modules and three steps", runs(sys.executable, **path))
    return (
        told("lowest packages: tests of what reads models and texts", done(*tests, **path))
        and passed
    )


def _installed(wanted: list[str]) -> bool:
    """Bring the folder up to date; return whether it is."""
    stored, content = FOLDER / LIST, "\n".join(wanted)
    if not stored.exists() or stored.read_text() != content:
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        if not done(sys.executable, *INSTALL, "--target", str(FOLDER), *wanted):
            return False
        stored.write_text(content)
    return True
