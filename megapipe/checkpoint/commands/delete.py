"""Removes checkpoints of a run by step or name. The last intact checkpoint stays, unless --last is
given. A kill never leaves half of a checkpoint. On object storage the command cannot tell whether a
job uses the run: make sure that no job resumes from a removed checkpoint.

example: checkpoint.py delete runs/latest 100 step-00000120.1
"""

import argparse
from contextlib import nullcontext
from pathlib import Path

from megapipe.checkpoint.commands.arguments import A_RUN, alone_in, location, pointer_of, root_of
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
    parser.add_argument("folder", type=location, metavar="RUN", help=A_RUN)
    parser.add_argument(
        "names", nargs="+", metavar="STEP", help="a step (all its checkpoints), or a folder's name"
    )
    parser.add_argument(
        "--last", action="store_true", help="allow deleting the last intact checkpoint"
    )


def run(given: argparse.Namespace) -> None:
    root = root_of(given.folder)
    local = isinstance(root, Path)
    with alone_in(root) if isinstance(root, Path) else nullcontext():
        chosen = {path for name in given.names for path in _named(root, name)}
        left = find_intact(root, skip=chosen).path
        if left is None and not given.last:
            raise ConfigError(
                f"{root}: this would delete the last intact checkpoint: name fewer, or pass --last"
            )
        removed, problems = remove(root, sorted(chosen), alone=local)
        for path in removed:
            print(f"removed {path}")
        if left is None:
            at(root / POINTER).unlink()
        elif pointer_of(root) in {path.name for path in removed}:
            point_at(root, left.name)
            print(f"{root / POINTER} now names {left.name}")
    if problems:
        raise CheckpointError("; ".join(problems))


def _named(root: StorageLocation, name: str) -> list[StorageLocation]:
    """Return the checkpoints with this step or name. Raises ConfigError if there are none."""
    found = [root / key.name for key in committed(root) if name in (key.name, str(key.step))]
    if not found:
        raise ConfigError(
            f"{root} has no checkpoint {name!a}; megapipe checkpoint list shows its checkpoints"
        )
    return found
