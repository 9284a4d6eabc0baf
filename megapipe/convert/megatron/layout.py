"""Folders of Megatron-LM's checkpoints: ``iter_0000100`` for each iteration, and a tracker file."""

from __future__ import annotations

import re
from pathlib import Path

from megapipe.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
"""Name of a file that every iteration in the distributed format has."""
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
"""Pattern of the folder of a rank in the older format, with the tp, pp and ep index."""
_RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")


def find_iteration(path: Path) -> Path:
    """Return the folder of an iteration: `path` itself, else the subfolder that the tracker file
    names, else the newest subfolder. Raises CheckpointError if there is none."""
    if _is_iteration(path):
        return path
    try:
        latest = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        latest = ""
    if latest:
        name = f"iter_{int(latest):07d}" if latest.isdecimal() else latest
        if name != _RELEASE and not _ITERATION.fullmatch(name):
            raise CheckpointError(f"{path / TRACKER}: {latest!a} is not an iteration")
        if not _is_iteration(path / name):
            raise CheckpointError(f"{path / TRACKER} names {name}, which has no checkpoint")
        return path / name
    found = [
        (int(match[1]), each)
        for each in (path.iterdir() if path.is_dir() else ())
        if (match := _ITERATION.fullmatch(each.name)) and _is_iteration(each)
    ]
    if not found:
        raise CheckpointError(
            f"{path} is not a Megatron-LM checkpoint: expected a folder with iter_... "
            f"folders, or one of these, with {FORMAT} or mp_rank_... in it"
        )
    return max(found)[1]


def is_megatron(path: Path) -> bool:
    """Whether a folder looks like a Megatron-LM checkpoint."""
    if (path / TRACKER).is_file() or _is_iteration(path):
        return True
    return path.is_dir() and any(_ITERATION.fullmatch(each.name) for each in path.iterdir())


def _is_iteration(path: Path) -> bool:
    if (path / FORMAT).is_file():
        return True
    return path.is_dir() and any(RANK.fullmatch(each.name) for each in path.iterdir())
