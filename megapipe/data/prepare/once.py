"""A folder that several processes need, and one of them makes.

The process that makes ``corpus``, its maker, works in ``.corpus.1`` beside it, which it owns
(:mod:`megapipe.util.heartbeat`). When the folder is complete, a rename gives it its name. Until
then other processes wait and look whether the maker is alive. A process that finds it gone makes
the folder anew in ``.corpus.2``.

A wrong judgement does no harm: a maker that was only suspended goes on in its own folder, the first
to finish wins, and both make the same. What is left under other names by makers that are gone is
removed by the next maker or run (:mod:`megapipe.data.prepare.leftovers`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from megapipe.data.prepare.leftovers import MAKER, remove_leftovers
from megapipe.util import heartbeat
from megapipe.util.heartbeat import attempts, beating


def build_once(
    folder: Path, fill: Callable[[Path], None], note: Callable[[str], None] | None = None
) -> None:
    """Return when `folder` exists, made here or by another process that was first.

    `fill` fills a folder of another name, which is then renamed. `note` is given a line if there is
    a maker to wait for, or to take over from, or if something was removed; by default the line goes
    to stderr. Raises what `fill` raises, and OSError; the unfinished folder is then removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    note = note or heartbeat.print_notice
    watch = _Watch(note, folder)
    while not folder.exists():
        number, newest = max(attempts(folder), default=(0, None))
        if newest is not None and not watch.is_gone(newest):
            continue
        own = folder.with_name(f".{folder.name}.{number + 1}")
        try:
            own.mkdir()
        except FileExistsError:  # another was first to see that
            continue
        _make(folder, own, fill, note)


def _make(
    folder: Path, own: Path, fill: Callable[[Path], None], note: Callable[[str], None]
) -> None:
    try:
        if folder.exists():  # by one that finished since we looked
            return
        with beating(own / MAKER):
            remove_leftovers(folder.parent, note, folder.name)
            fill(own)
        own.rename(folder)
    except Exception:
        if not folder.exists():  # else another process was first, and may have taken things away
            raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if folder.exists():
            for _, path in attempts(folder):
                shutil.rmtree(path, ignore_errors=True)


class _Watch:
    """Makers that a waiting process has seen."""

    def __init__(self, note: Callable[[str], None], folder: Path) -> None:
        self.note = note
        self.folder = folder
        self._watch = heartbeat.OwnerWatch()
        self._told: Path | None = None

    def is_gone(self, attempt: Path) -> bool:
        """Whether the maker in `attempt` is gone; if not, returns after a pause."""
        watch = self._watch
        if watch.look(attempt / MAKER) == "gone":
            self.note(f"{watch.name()}, which prepared {self.folder}, is gone: taking over")
            return True
        if self._told != attempt and watch.owner is not None:
            self.note(f"waiting for {watch.owner}, which prepares {self.folder}")
            self._told = attempt
        watch.pause()
        return False
