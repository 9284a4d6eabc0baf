"""The lowest version of Python that pyproject.toml declares, and what the sources lack under it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.running.processes import ROOT

FOLDERS = ("megapipe", "scripts", "benchmarks", "examples")
SOURCES = ("train.py", *(f"{folder}/**/*.py" for folder in FOLDERS))
Version = tuple[int, int]


def declared(root: Path = ROOT) -> Version:
    """Read the lowest version from `requires-python`."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = re.fullmatch(r">=(\d+)\.(\d+)", project["requires-python"])
    assert found is not None, project["requires-python"]
    return int(found[1]), int(found[2])


def interpreter(version: Version) -> str | None:
    """Find an interpreter of that version: this one, one of PATH, or one that pyenv has."""
    return next((path for path in _candidates(version) if _version_of(path) == version), None)


def _candidates(version: Version) -> Iterator[str]:
    yield sys.executable
    name = "python{}.{}".format(*version)
    if (found := shutil.which(name)) is not None:
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version[0]}.{version[1]}.*/bin/{name}")))


def _version_of(path: str) -> Version | None:
    """Ask an interpreter for its version; a shim of pyenv may have none to start."""
    code = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    major, minor = done.stdout.split()
    return int(major), int(minor)


def mistakes(root: Path = ROOT, version: Version | None = None) -> list[str] | None:
    """List what the sources below `root` lack under the version, by default the declared one;
    None: there is no interpreter of it here."""
    python = interpreter(version or declared(root))
    if python is None:
        return None
    files = [str(path) for pattern in SOURCES for path in sorted(root.glob(pattern))]
    given = json.dumps({"files": files, "modules": sorted(sys.stdlib_module_names)})
    script = Path(__file__).with_name("stdlib_imports.py")
    done = subprocess.run(
        [python, "-I", str(script)], input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout.splitlines()


def check() -> bool:
    """Print what the sources lack under the declared version; return whether they lack nothing."""
    name = "Python {}.{}".format(*declared())
    found = mistakes()
    if found is None:
        print(f"imports under {name} were not checked: it is not on this machine", flush=True)
        return True
    print(*found, f"imports under {name}: {len(found)} mistakes", sep="\n", flush=True)
    return not found
