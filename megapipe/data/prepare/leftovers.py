"""Removal of the folders that killed preparations (of corpora, indices, copies) have left.

A preparation removes leftovers under the name of its own folder. But after a kill nobody may ever
prepare that name again. So every preparation also checks the other names, and so does a run that
finds its corpus prepared. Before a process removes a leftover, it takes ownership of the name, as
if it prepared that name itself (:mod:`megapipe.data.prepare.build_once`), so that no other process
starts to prepare it meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from megapipe.text import count_noun
from megapipe.util import heartbeat
from megapipe.util.heartbeat import attempts, beating

MAKER = "maker"
"""Name of the heartbeat file in an unfinished folder. It identifies the folder's maker, the process
that fills the folder."""
SILENT_S = 24 * 3600.0
"""Seconds without a heartbeat after which a maker counts as gone, if it is on another machine or
unidentified."""
KEPT_S = 7 * 24 * 3600.0
"""Seconds for which finished shards are kept, so that a preparation may continue from them."""

_LEFT = re.compile(r"\.(.+)\.\d+"), re.compile(r"\.((?:remote-)?[0-9a-f]+)\.parts")
"""Patterns of the names of makers' folders, and of folders with finished shards."""
_OWN_NAME = re.compile(r"(packing-|remote-)?[0-9a-f]{32,64}")
"""Names that this package gives to folders in the cache; a user is unlikely to choose one."""


def remove_leftovers(cache: Path, note: Callable[[str], None], but: str = "") -> None:
    """Remove the leftovers of killed processes in `cache`, which need not exist. Leftovers of the
    folder named `but` stay.

    Unfinished folders are removed at once if their maker ran on this machine and has ended, and
    after a day without a heartbeat otherwise. Finished shards are removed when the folder that was
    made from them exists, or after a week. `note` is called with one line of text if anything was
    removed.
    """
    sizes: list[int] = []
    with contextlib.suppress(OSError):  # cleaning up is optional
        matches = (kind.fullmatch(name) for name in os.listdir(cache) for kind in _LEFT)
        names = sorted({match[1] for match in matches if match} - {but})
        now = _now(cache) if names else 0.0
        for name in names:
            with contextlib.suppress(OSError):  # other processes may be removing it
                sizes += _remove(cache / name, now)
    if sizes:
        note(
            f"removed {count_noun(len(sizes), 'folder')}, {sum(sizes) / 1e6:,.1f} MB, that killed "
            f"preparations had left in {cache}"
        )


def _now(folder: Path) -> float:
    """Return the present time by the clock that sets the file times in `folder`."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _remove(folder: Path, now: float) -> list[int]:
    """Remove the leftovers of `folder`, unless a process is building `folder`. Return the number of
    bytes of each removed leftover."""
    number = _unowned(folder, now)
    if number is None:
        return []
    parts = folder.with_name(f".{folder.name}.parts")
    if not number and not _is_useless(parts, folder, now):
        return []
    own = folder.with_name(f".{folder.name}.{number + 1}")
    try:
        own.mkdir()
    except FileExistsError:  # another process has just started to build it
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
    """Return the largest N of the unfinished folders ``.NAME.N`` for `folder`, 0 if there are none.
    Return None if a process may still be filling one of them other than `but`."""
    last = 0
    for number, path in attempts(folder):
        if path != but and not _is_gone(path, folder.name, now):
            return None
        last = max(last, number)
    return last


def _is_gone(attempt: Path, name: str, now: float) -> bool:
    """Whether the unfinished folder `attempt` for the folder `name` certainly has no live maker."""
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
    """Return the seconds since a name in `folder` last changed; each heartbeat changes one."""
    return now - max(os.lstat(inside).st_mtime for inside, _, _ in os.walk(folder))
