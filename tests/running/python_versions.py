"""Every module and three steps of a training, under the lowest and the highest Python of a machine.

The interpreter of the tests has the packages; another one gets an environment of its own, beside
theirs. Where the packages cannot be installed for it, that is said.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.running.lowest_python import Version, declared, interpreter
from tests.running.processes import ROOT

NEWEST = 30
"""Minor versions below which an interpreter is looked for."""
MODULES = """
import importlib, pkgutil, megapipe
names = [found.name for found in pkgutil.walk_packages(megapipe.__path__, "megapipe.")]
for name in names:
    if not name.endswith("__main__"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name.partition(".")[0] != "lm_eval":  # of a command that asks for it
                raise
"""
TRAINING = (
    *("-m", "megapipe", "train", "configs/quickstart.yaml", "train.steps=3", "run.name=three"),
    *("parallel.dp=1", "parallel.tp=1", "parallel.pp=1"),
    *("pipeline.schedule=1f1b", "pipeline.chunks=null"),
    *("train.sequence_length=32", "train.validation_samples=8"),
)
INSTALL = ("-m", "pip", "--disable-pip-version-check", "install", "-q")
PACKAGES = (("torch",), ("-e", "."))


def check() -> bool:
    """Print which versions ran, and return whether none failed."""
    here = [version for version in _supported() if interpreter(version) is not None]
    passed = True
    for version in dict.fromkeys((here[0], here[-1])) if here else ():
        name = "Python {}.{}".format(*version)
        python = _with_packages(version)
        if python is None:
            print(f"{name} was not tried: the packages cannot be installed for it", flush=True)
            continue
        passed &= told(f"{name}: all modules and three steps", runs(python))
    return passed


def _supported() -> list[Version]:
    major, minor = declared()
    return [(major, number) for number in range(minor, NEWEST)]


def _with_packages(version: Version) -> str | None:
    """Find or make an environment for the version; None: it cannot be made."""
    if version == sys.version_info[:2]:
        return sys.executable
    base = interpreter(version)
    assert base is not None
    folder = Path(sys.prefix) / "python{}.{}".format(*version)
    python = str(folder / "bin/python")
    if not folder.exists() and not done(base, "-m", "venv", str(folder)):
        return None
    pinned = (python, *INSTALL, "-c", "constraints.txt")
    return python if all(done(*pinned, *names) for names in PACKAGES) else None


def runs(python: str, **environ: str) -> bool:
    """Import all modules with an interpreter, and train three steps; return whether that passed."""
    with tempfile.TemporaryDirectory(prefix="three-steps-") as folder:
        training = (*TRAINING, f"run.folder={folder}")
        return all(done(python, *how, **environ) for how in (("-c", MODULES), training))


def done(*command: str, **environ: str) -> bool:
    """Run a command in the root, and return whether it passed; its output is shown if not."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    ended = subprocess.run(
        command, cwd=ROOT, env=given, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        print(*(ended.stdout + ended.stderr).splitlines()[-20:], sep="\n", flush=True)
    return ended.returncode == 0


def told(what: str, passed: bool) -> bool:
    """Print whether something passed, and return it."""
    print(f"{what} {'passed' if passed else 'failed'}", flush=True)
    return passed
