"""Files and folders below a given folder, opened without following symbolic links.

Other users may have made a run folder, or may write to it. A link in the folder must not make a run
write where only the run's user may write. A check of the whole folder beforehand would miss links
that are made later. So each name is opened relative to its parent folder, which is open already.
The given folder itself may be a link, because the user has named it.
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
    """Make the folder ``root/name`` and missing folders in between. Return its path. Raises
    OSError, also if one of the folders is a link."""
    root.mkdir(parents=True, exist_ok=True)
    with _entered(root, name.split("/")):
        return root / name


def refuse_links(folder: Path) -> None:
    """Raise OSError if `folder`, or anything below it at any depth, is a symbolic link."""
    paths = [folder]
    for parent, folders, files in os.walk(folder):
        paths += [Path(parent, name) for name in (*folders, *files)]
    for path in paths:
        if path.is_symlink():
            raise _is_link(path)


def open_no_symlinks(root: Path, name: str, mode: str, **how: Any) -> IO[Any]:
    """Open the file ``root/name`` as :func:`open` does, making missing folders in between. Raises
    OSError, also if the file or a folder is a link."""
    *folders, last = name.split("/")

    def opener(path: str, flags: int) -> int:
        with _entered(root, folders) as inside:
            _refuse_link(inside, last, Path(path))
            return os.open(last, flags | os.O_NOFOLLOW, 0o666, dir_fd=inside)

    return open(root / name, mode, opener=opener, **how)


def write_no_symlinks(root: Path, name: str, text: str) -> None:
    """Write a text file, opened with :func:`open_no_symlinks`."""
    with open_no_symlinks(root, name, "w", encoding="utf-8") as file:
        file.write(text)


@contextlib.contextmanager
def _entered(root: Path, names: Sequence[str]) -> Iterator[int]:
    """Open the folder ``root/NAME/NAME/...``, making missing folders, and yield its descriptor."""
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
    """Raise a readable error if `path` is a link; O_NOFOLLOW alone gives only an errno."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _is_link(path)


def _is_link(path: Path) -> OSError:
    return OSError(errno.ELOOP, f"{path} is a symbolic link, through which a run does not write")
