"""Folders of Megatron-LM's checkpoints: ``iter_0000100`` for each iteration, and a tracker file."""

from __future__ import annotations

import re
from pathlib import Path

from megapipe.errors import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
FORMAT = "metadata.json"
"""A file that an iteration of the distributed format has."""
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
"""A folder that one of the older format has for each rank: of tp, pp and ep."""
_RELEASE = "release"
_ITERATION = re.compile(r"iter_(\d{7,})")


def find_iteration(path: Path) -> Path:
    """The folder of an iteration: `path`, or of those in it the one that the tracker names, else
    the newest. Raises CheckpointError if there is none."""
    if _is_iteration(path):
        return path
    try:
        said = (path / TRACKER).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        said = ""
    if said:
        name = f"iter_{int(said):07d}" if said.isdecimal() else said
        if name != _RELEASE and not _ITERATION.fullmatch(name):
            raise CheckpointError(f"{path / TRACKER}: {said!a} is no iteration")
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
            f"{path}: no checkpoint of Megatron-LM; expected iter_... folders with {FORMAT} or "
            "mp_rank_... in them, or one of these"
        )
    return max(found)[1]


def is_megatron(path: Path) -> bool:
    """Whether a folder looks like one of Megatron-LM's."""
    if (path / TRACKER).is_file() or _is_iteration(path):
        return True
    return path.is_dir() and any(_ITERATION.fullmatch(each.name) for each in path.iterdir())


def _is_iteration(path: Path) -> bool:
    if (path / FORMAT).is_file():
        return True
    return path.is_dir() and any(RANK.fullmatch(each.name) for each in path.iterdir())
