"""Look-ups of paths that users name: a path that cannot be looked up counts as missing.

:class:`pathlib.Path` raises if a name is too long, if a folder may not be entered, or if ``~name``
is not a user's home. For the user of megapipe, such a path simply does not exist.
"""

import os
import tempfile
from pathlib import Path

LATEST = "latest"
"""Name of the symbolic link, in the folder of all runs, to the run that was started last."""


def user_path(name: str) -> Path:
    """Return the path for a name, with ``~`` at its beginning replaced by the home folder."""
    return Path(os.path.expanduser(name))


def temporary_folder_problem() -> str | None:
    """Return an error text if no folder for temporary files is writable; torch needs one."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        tried = (error.strerror or "").partition(" in ")[2]
        return (
            f"no temporary file can be written to {tried}: free space in one of them, or set "
            "TMPDIR to a writable folder"
        )
    return None


def exists(path: Path) -> bool:
    """Whether the path is a file or a folder."""
    return os.path.exists(path)


def is_file(path: Path) -> bool:
    """Whether the path is a file."""
    return os.path.isfile(path)


def is_folder(path: Path) -> bool:
    """Whether the path is a folder."""
    return os.path.isdir(path)
