"""A cache on disk of what plans measure and search, so that repeating a plan needs no torch.

If a folder is not writable or a file is damaged, the work is done again, without an error.
Several processes may write at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from megapipe.version import PACKAGE

M = TypeVar("M", bound=BaseModel)

MOST = 2000
"""Maximum number of files in a folder. Above it, the older half of the files is deleted."""


def user_cache() -> Path:
    """Return the cache folder in the user's home, which all plans of the user share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "megapipe" / "units"


def key_of(**entries: Any) -> str:
    """Return a key of a cache for `entries`, this version of the program, and torch's."""
    everything = {"torch": version("torch"), "program": _program(), **entries}
    text = json.dumps(everything, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _program() -> str:
    """Return a text that changes if a file of megapipe's package changes."""
    files = ((path, path.stat()) for path in sorted(PACKAGE.rglob("*.py")))
    return str([(str(path.relative_to(PACKAGE)), s.st_size, s.st_mtime_ns) for path, s in files])


class Cache:
    """Cached pydantic models by key; a key is read from the first folder that has it."""

    def __init__(self, folders: Sequence[Path] | None = None) -> None:
        self._folders = [user_cache()] if folders is None else folders

    def get(self, key: str, kind: type[M], make: Callable[[], M]) -> M:
        """Read the model cached under `key`, or make it; write it to the folders that lack it."""
        found, lacking = None, list[Path]()
        for folder in self._folders:
            if (found := _read(folder, key, kind)) is not None:
                break
            lacking.append(folder)
        found = make() if found is None else found
        self._write(lacking, key, found)
        return found

    def read(self, key: str, kind: type[M]) -> M | None:
        """Return the model cached under `key`; None if there is none."""
        found = (_read(folder, key, kind) for folder in self._folders)
        return next((each for each in found if each is not None), None)

    def write(self, key: str, model: BaseModel) -> None:
        """Write a model under `key` to all folders."""
        self._write(self._folders, key, model)

    def _write(self, folders: Sequence[Path], key: str, model: BaseModel) -> None:
        for folder in folders:
            with contextlib.suppress(OSError):
                _write(folder, key, model.model_dump_json())


def _read(folder: Path, key: str, kind: type[M]) -> M | None:
    with contextlib.suppress(OSError, ValidationError):
        return kind.model_validate_json((folder / f"{key}.json").read_bytes())
    return None


def _write(folder: Path, key: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(folder / f"{key}.json")
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    _bound(folder)


def _bound(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) > MOST:
        for each in sorted(files, key=lambda file: file.stat().st_mtime)[: len(files) // 2]:
            each.unlink(missing_ok=True)
