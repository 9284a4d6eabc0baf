"""Removes what killed preparations have left in a folder, whatever it was that they prepared.

A preparation clears its own name when it ends; one that was killed may never be asked for again. So
whoever prepares something looks at the other names too, and so does a run that finds its corpus
prepared. To remove something it first owns the name, as if it prepared that itself
(:mod:`megapipe.data.prepare.once`): nobody begins with it meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from megapipe.util import heartbeat
from megapipe.util.heartbeat import attempts, beating
from megapipe.words import count_noun

MAKER = "maker"
"""The file in a maker's folder that says who it is."""
SILENT_S = 24 * 3600.0
"""Seconds after its last sign of life after which a maker on another machine, or one that did not
say who it is, is taken for gone."""
KEPT_S = 7 * 24 * 3600.0
"""Seconds that finished parts are kept for a preparation that goes on with them."""

_LEFT = re.compile(r"\.(.+)\.\d+"), re.compile(r"\.((?:remote-)?[0-9a-f]+)\.parts")
"""Names of folders that makers were working in, and of finished parts."""
_OWN_NAME = re.compile(r"(packing-|remote-)?[0-9a-f]{32,64}")
"""Names that are given here and hardly by a user."""


def remove_leftovers(cache: Path, note: Callable[[str], None], but: str = "") -> None:
    """Remove what processes that are gone have left in `cache`, which may not be there, except
    under the name `but`.

    Unfinished folders go at once if their maker was of this machine; parts when what they were for
    is there, or after a week. One line is noted if there was anything.
    """
    sizes: list[int] = []
    with contextlib.suppress(OSError):  # nothing depends on it
        matches = (kind.fullmatch(name) for name in os.listdir(cache) for kind in _LEFT)
        names = sorted({match[1] for match in matches if match} - {but})
        now = _now(cache) if names else 0.0
        for name in names:
            with contextlib.suppress(OSError):  # others may be at it
                sizes += _remove(cache / name, now)
    if sizes:
        note(
            f"removed {count_noun(len(sizes), 'folder')}, {sum(sizes) / 1e6:,.1f} MB, that killed "
            f"preparations had left in {cache}"
        )


def _now(folder: Path) -> float:
    """The time by the clock that gives all files there their times."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _remove(folder: Path, now: float) -> list[int]:
    """Remove what is left of `folder`, unless somebody makes it: bytes of each thing removed."""
    number = _unowned(folder, now)
    if number is None:
        return []
    parts = folder.with_name(f".{folder.name}.parts")
    if not number and not _is_useless(parts, folder, now):
        return []
    own = folder.with_name(f".{folder.name}.{number + 1}")
    try:
        own.mkdir()
    except FileExistsError:  # somebody has just begun with it
        return []
    try:
        with beating(own / MAKER):
            if _unowned(folder, now, but=own) is None:
                return []
            left = [path for _, path in attempts(folder) if path != own]
            if _is_useless(parts, folder, now):
                left.append(parts)
            sizes = [sum(file.lstat().st_size for file in path.rglob("*")) for path in left]
            for path in left:
                shutil.rmtree(path, ignore_errors=True)
            return [size for path, size in zip(left, sizes, strict=True) if not path.exists()]
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _unowned(folder: Path, now: float, but: Path | None = None) -> int | None:
    """The number of the last attempt to make `folder`, 0 without any; None if one of them, `but`
    left out, may have a maker."""
    last = 0
    for number, path in attempts(folder):
        if path != but and not _is_gone(path, folder.name, now):
            return None
        last = max(last, number)
    return last


def _is_gone(attempt: Path, name: str, now: float) -> bool:
    """Whether an unfinished folder is certainly nobody's."""
    if not _is_folder(attempt):
        return False
    owner = heartbeat.read(attempt / MAKER)
    if owner is not None and owner.is_here:
        return owner.ended
    if owner is None and not _OWN_NAME.fullmatch(name):
        return False
    return _silence(attempt, now) > SILENT_S


def _is_useless(parts: Path, folder: Path, now: float) -> bool:
    return _is_folder(parts) and (folder.exists() or _silence(parts, now) > KEPT_S)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _silence(folder: Path, now: float) -> float:
    """Seconds since something in it was made or renamed, as a sign of life is."""
    return now - max(os.lstat(inside).st_mtime for inside, _, _ in os.walk(folder))
