"""A folder that several processes need and one of them builds.

The maker, the process that builds the folder ``corpus``, works in a neighbouring folder
``.corpus.1``, which it owns (:mod:`megapipe.util.heartbeat`). The complete folder is renamed to
``corpus``. Until then other processes wait and check whether the maker is alive. If the maker is
gone, one of them builds the folder anew in ``.corpus.2``.

A wrong judgement does no harm: a maker that was only suspended continues in its own folder, both
makers build the same, and the first to finish wins. Leftovers of killed makers under other names
are removed by the next maker or run (:mod:`megapipe.data.prepare.leftovers`).
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
    """Return once `folder` exists, built by this or another process.

    `fill` writes the content into a folder with a temporary name, which is then renamed. `note` is
    called with a line of text if this process waits for the maker, takes over from a maker that is
    gone, or has removed leftovers; default: print it to stderr. Raises the errors of `fill`, and
    OSError; the unfinished folder is then removed.
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
        except FileExistsError:  # another process was first to notice
            continue
        _make(folder, own, fill, note)


def _make(
    folder: Path, own: Path, fill: Callable[[Path], None], note: Callable[[str], None]
) -> None:
    try:
        if folder.exists():  # finished by another process since we looked
            return
        with beating(own / MAKER):
            remove_leftovers(folder.parent, note, folder.name)
            fill(own)
        own.rename(folder)
    except Exception:
        if not folder.exists():  # else another process was first, and may have removed our files
            raise
    finally:
        shutil.rmtree(own, ignore_errors=True)
        if folder.exists():
            for _, path in attempts(folder):
                shutil.rmtree(path, ignore_errors=True)


class _Watch:
    """Watches the maker of `folder` for a waiting process, and calls `note` with lines about it."""

    def __init__(self, note: Callable[[str], None], folder: Path) -> None:
        self.note = note
        self.folder = folder
        self._watch = heartbeat.OwnerWatch()
        self._reported: Path | None = None

    def is_gone(self, attempt: Path) -> bool:
        """Whether the process that builds in the folder `attempt` has died. If not, sleep first."""
        watch = self._watch
        if watch.look(attempt / MAKER) == "gone":
            self.note(f"{watch.name()}, which prepared {self.folder}, is gone: taking over")
            return True
        if self._reported != attempt and watch.owner is not None:
            self.note(f"waiting for {watch.owner}, which prepares {self.folder}")
            self._reported = attempt
        watch.pause()
        return False
