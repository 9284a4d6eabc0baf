"""Files and folders beneath a folder, made without following a symbolic link on the way.

A run folder may come from somebody else, or be one that others may write to: a link in it must not
have a run write to where its owner alone may. A look at the whole folder beforehand would not see a
link that is made later, so each name is opened from within the folder that was opened before it.
The folder itself may be a link: it is the user who names it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any


def make_folder(root: Path, name: str) -> Path:
    """Make the folder ``root/name``, and those in between, as far as they are not there; returns
    its path. Raises OSError, also where one of them is a link."""
    root.mkdir(parents=True, exist_ok=True)
    with _entered(root, name.split("/")):
        return root / name


def refuse_links(folder: Path) -> None:
    """Raise OSError for a symbolic link at `folder` or beneath it, at any depth."""
    paths = [folder]
    for parent, folders, files in os.walk(folder):
        paths += [Path(parent, name) for name in (*folders, *files)]
    for path in paths:
        if path.is_symlink():
            raise _is_link(path)


def open_no_symlinks(root: Path, name: str, mode: str, **how: Any) -> IO[Any]:
    """Open the file ``root/name`` as :func:`open` does; folders in between are made. Raises
    OSError, also where it or one of them is a link."""
    *folders, last = name.split("/")

    def opener(path: str, flags: int) -> int:
        with _entered(root, folders) as inside:
            _refuse_link(inside, last, Path(path))
            return os.open(last, flags | os.O_NOFOLLOW, 0o666, dir_fd=inside)

    return open(root / name, mode, opener=opener, **how)


def write_no_symlinks(root: Path, name: str, text: str) -> None:
    """Write a file of text, as :func:`open_no_symlinks` opens it."""
    with open_no_symlinks(root, name, "w", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def _entered(root: Path, names: Sequence[str]) -> Iterator[int]:
    """The folder as it is open."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    inside = os.open(root, flags)
    try:
        for depth, name in enumerate(names, 1):
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=inside)
            _refuse_link(inside, name, root.joinpath(*names[:depth]))
            outside, inside = inside, os.open(name, flags | os.O_NOFOLLOW, dir_fd=inside)
            os.close(outside)
        yield inside
    finally:
        os.close(inside)


def _refuse_link(folder: int, name: str, path: Path) -> None:
    """Say in words what O_NOFOLLOW, by which links are not followed, has none for."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _is_link(path)


def _is_link(path: Path) -> OSError:
    return OSError(errno.ELOOP, f"{path} is a symbolic link, which a run does not write through")
