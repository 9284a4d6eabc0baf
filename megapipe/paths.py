"""Paths that users name, looked up without surprises.

:class:`pathlib.Path` raises where a name is too long, where a folder may not be entered, and where
``~name`` is no user's home. To a user, nothing is there.
"""

import os
from pathlib import Path

LATEST = "latest"
"""Name of the link to the run that was started last, in the folder with all runs."""


def user_path(name: str) -> Path:
    """The path of a name that may begin with ``~``."""
    return Path(os.path.expanduser(name))


def exists(path: Path) -> bool:
    """Whether there is a file or a folder."""
    return os.path.exists(path)


def is_file(path: Path) -> bool:
    """Whether there is a file."""
    return os.path.isfile(path)


def is_folder(path: Path) -> bool:
    """Whether there is a folder."""
    return os.path.isdir(path)
