"""A copy of the files of a fresh clone, and commands in it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.parity.jobs import ROOT

CONSOLE = "import sys\nfrom megapipe.console import main\nsys.exit(main())\n"
"""The script that pip writes for an entry point."""


def make_clone(clone: Path) -> None:
    """Fill `clone` with the files that git has of this tree, and a .venv with the packages of this
    one."""
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    if not files:
        pytest.skip("not a git work tree")
    for name in files:
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    venv.create(clone / ".venv")
    (site,) = (clone / ".venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{clone}\n{sysconfig.get_path('purelib')}\n")
    console = clone / ".venv/bin/megapipe"
    console.write_text(f"#!{clone}/.venv/bin/python\n{CONSOLE}")
    console.chmod(0o755)
    digest = hashlib.sha256(os.fsencode(clone))
    for name in ("constraints.txt", "pyproject.toml"):
        digest.update((clone / name).read_bytes())
    (clone / ".venv/megapipe.stamp").write_text(f"{digest.hexdigest()}\n")


def run(clone: Path, script: list[str], *, binaries: Path = Path(sys.executable).parent) -> str:
    """Run commands in one shell that stops at the first failure; return what they print."""
    kept = ("HOME", "LANG", "LC_ALL", "TMPDIR", "OMP_NUM_THREADS")
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(script)],
        cwd=clone,
        env={
            **{name: os.environ[name] for name in kept if name in os.environ},
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
