"""Measured units on disk, so that a plan that was made before needs no torch.

A folder that cannot be written to, and a file that is damaged, cost a measurement, not an error.
Several processes may write at once.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)

MOST = 2000
"""Most files of a folder: the older half of them goes when there are more."""


def user_cache() -> Path:
    """Return the folder of the user's that all plans share."""
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "megapipe" / "units"


class Cache:
    """Models by key, in the first of some folders that has them."""

    def __init__(self, folders: Sequence[Path] | None = None) -> None:
        self._folders = [user_cache()] if folders is None else folders

    def get(self, key: str, kind: type[M], make: Callable[[], M]) -> M:
        """Read the model of a key, or make it; write it to the folders that lack it."""
        found, lacking = None, list[Path]()
        for folder in self._folders:
            with contextlib.suppress(OSError, ValidationError):
                found = kind.model_validate_json((folder / f"{key}.json").read_bytes())
                break
            lacking.append(folder)
        found = make() if found is None else found
        for folder in lacking:
            with contextlib.suppress(OSError):
                _write(folder, key, found.model_dump_json())
        return found


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
