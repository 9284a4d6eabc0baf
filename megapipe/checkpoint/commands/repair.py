"""Removes what killed saves left in a run, and has `latest` name the newest checkpoint whose every
byte is what was written. Damaged checkpoints are named and stay. A run that goes on needs none of
this: it looks at the checkpoints themselves. Not for object storage, where half of a save may be of
a job that runs: a run removes what its killed jobs have left there when it starts.

example: checkpoint.py repair runs/latest
"""

import argparse
from pathlib import Path

from megapipe.checkpoint.commands.arguments import A_RUN, alone_in, place, pointer_of, root_of
from megapipe.checkpoint.find import find_intact
from megapipe.checkpoint.names import POINTER
from megapipe.checkpoint.retention import clear_leftovers
from megapipe.checkpoint.writer import point_at
from megapipe.command_line import Parser
from megapipe.errors import CheckpointError, ConfigError

PURPOSE = "remove leftovers of killed saves, mend the pointer"


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=place, metavar="RUN", help=A_RUN)


def run(given: argparse.Namespace) -> None:
    root = root_of(given.folder)
    if not isinstance(root, Path):
        raise ConfigError(
            f"{root} is on object storage, where a run removes what its killed jobs have left when "
            "it starts: start it again"
        )
    with alone_in(root):
        removed, problems = clear_leftovers(root)
        for path in removed:
            print(f"removed {path}")
        newest, damaged = find_intact(root)
        for reason in damaged:
            print(f"passed over: {reason}")
        if newest is None:
            raise CheckpointError(f"{root}: no checkpoint there is sound")
        if pointer_of(root) != newest.name:
            point_at(root, newest.name)
            print(f"{root / POINTER} names {newest.name} now")
    if problems:
        raise CheckpointError("; ".join(problems))
    print(f"{root}: the newest sound checkpoint is {newest.name}")
