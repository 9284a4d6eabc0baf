"""Provenance, written into every run folder: code, machine and library versions."""

import hashlib
import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

from megapipe.version import PACKAGE, __version__

_PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "transformers", "datasets")


class GitState(TypedDict):
    """Commit of a git work tree, and whether the tree has changes."""

    commit: str
    dirty: bool


class Provenance(TypedDict):
    """Versions, git state and host of a start, from :func:`provenance`; serialises to JSON."""

    versions: dict[str, str | None]
    git: GitState | None
    package_hash: str
    host: str
    platform: str


def provenance(root: Path) -> Provenance:
    """Return versions, git state of the source tree ``root``, package hash and host.

    A package that is not installed has version None; ``git`` is None unless ``root`` is the top of
    a git work tree. Environment variables are not recorded.
    """
    return {
        "versions": {
            "python": platform.python_version(),
            "megapipe": __version__,
            **{name: _version(name) for name in _PACKAGES},
        },
        "git": git_state(root),
        "package_hash": package_hash(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
    }


def start_suffix(run_folder: Path, step: int) -> str:
    """Return the suffix of the files that a resumed start writes, such as ``-step-00000018`` for
    `step` 18. A number is appended if the run has resumed at that step before."""
    suffix = f"-step-{step:08d}"
    before = len(list(run_folder.glob(f"config{suffix}*.yaml")))
    return f"{suffix}.{before}" if before else suffix


def newest_config(run_folder: Path) -> Path | None:
    """Return the configuration file of the run's newest start; None if there is none. The time of
    writing decides, not the step, as a rewound run starts at an earlier step."""
    found = run_folder.glob("config*.yaml")
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def git_state(root: Path) -> GitState | None:
    """Return the commit of the work tree with the top folder ``root``, and whether it has
    changes."""
    top = _git(root, "rev-parse", "--show-toplevel")
    commit = _git(root, "rev-parse", "HEAD")
    status = _git(root, "status", "--porcelain")
    if top is None or commit is None or status is None or not root.samefile(top):
        return None
    return {"commit": commit, "dirty": bool(status)}


def package_hash(folder: Path = PACKAGE) -> str:
    """Compute a SHA-256 over paths and contents of the package's files, except compiled ones.

    Ranks whose hashes differ run different code.
    """
    digest = hashlib.sha256()
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command that takes no locks, or None if it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        result = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()
