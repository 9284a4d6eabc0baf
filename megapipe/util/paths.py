"""Paths that users name, looked up without surprises.

:class:`pathlib.Path` raises where a name is too long, where a folder may not be entered, and where
``~name`` is no user's home. To a user, nothing is there.
"""

import os
import tempfile
from pathlib import Path

LATEST = "latest"
"""Name of the link to the run that was started last, in the folder with all runs."""


def user_path(name: str) -> Path:
    """The path of a name that may begin with ``~``."""
    return Path(os.path.expanduser(name))


def temporary_folder_problem() -> str | None:
    """Say that this host has no folder for temporary files, which torch needs to be loaded."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        tried = (error.strerror or "").partition(" in ")[2]
        return (
            f"no folder takes temporary files, of {tried}: make room in one, or set TMPDIR to a "
            "folder that can be written to"
        )
    return None


def exists(path: Path) -> bool:
    """Whether there is a file or a folder."""
    return os.path.exists(path)


def is_file(path: Path) -> bool:
    """Whether there is a file."""
    return os.path.isfile(path)


def is_folder(path: Path) -> bool:
    """Whether there is a folder."""
    return os.path.isdir(path)
