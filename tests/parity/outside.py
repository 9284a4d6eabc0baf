"""A folder next to a run, with a file, into which no run writes."""

from __future__ import annotations

import os
from pathlib import Path

MINE = "what the owner of the run alone may change"


def make_outside(parent: Path) -> Path:
    """Make the folder below `parent`."""
    folder = parent / "outside"
    folder.mkdir()
    (folder / "file").write_text(MINE)
    return folder


def untouched(outside: Path) -> bool:
    return os.listdir(outside) == ["file"] and (outside / "file").read_text() == MINE
