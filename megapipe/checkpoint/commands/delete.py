"""Removes checkpoints of a run by step or name. The last one whose every byte is what was written
stays, unless --last is given. A kill on the way leaves no half of a checkpoint. On object storage
nobody here can tell whether a job has the run: see to it that none goes on from one of these.

example: checkpoint.py delete runs/latest 100 step-00000120.1
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

from megapipe.checkpoint.commands.arguments import A_RUN, alone_in, place, pointer_of, root_of
from megapipe.checkpoint.find import find_intact
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import POINTER
from megapipe.checkpoint.retention import remove
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.checkpoint.writer import point_at
from megapipe.command_line import Parser
from megapipe.errors import CheckpointError, ConfigError

PURPOSE = "remove checkpoints"


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=place, metavar="RUN", help=A_RUN)
    parser.add_argument(
        "names", nargs="+", metavar="STEP", help="a step (all its checkpoints), or a folder's name"
    )
    parser.add_argument("--last", action="store_true", help="also the last that is sound")


def run(given: argparse.Namespace) -> None:
    root = root_of(given.folder)
    local = isinstance(root, Path)
    with alone_in(root) if isinstance(root, Path) else nullcontext():
        chosen = {path for name in given.names for path in _named(root, name)}
        left = find_intact(root, skip=chosen).path
        if left is None and not given.last:
            raise ConfigError(
                f"{root}: no sound checkpoint would be left: leave one out, or give --last"
            )
        removed, problems = remove(root, sorted(chosen), alone=local)
        for path in removed:
            print(f"removed {path}")
        if left is None:
            at(root / POINTER).unlink()
        elif pointer_of(root) in {path.name for path in removed}:
            point_at(root, left.name)
            print(f"{root / POINTER} names {left.name} now")
    if problems:
        raise CheckpointError("; ".join(problems))


def _named(root: StorageLocation, name: str) -> list[StorageLocation]:
    """The checkpoints of a step, or the one of a name. Raises ConfigError if there is none."""
    found = [root / key.name for key in committed(root) if name in (key.name, str(key.step))]
    if not found:
        raise ConfigError(f"{root} has no checkpoint {name!a}; list shows those that it has")
    return found
