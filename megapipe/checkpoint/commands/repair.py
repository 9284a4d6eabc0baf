"""Removes what killed saves left in a run, and points `latest` at the newest intact checkpoint.
Damaged checkpoints are listed and stay. Resuming a run does not need this command, because it looks
at the checkpoints themselves. The command refuses object storage, where an unfinished save may
belong to a running job; there a run removes the leftovers of its killed jobs when it starts.

example: checkpoint.py repair runs/latest
"""

import argparse
from pathlib import Path

from megapipe.checkpoint.commands.arguments import A_RUN, alone_in, location, pointer_of, root_of
from megapipe.checkpoint.find import find_intact
from megapipe.checkpoint.names import POINTER
from megapipe.checkpoint.retention import clear_leftovers
from megapipe.checkpoint.writer import point_at
from megapipe.command_line import Parser
from megapipe.errors import CheckpointError, ConfigError

PURPOSE = "remove leftovers of killed saves, repair the pointer"


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=location, metavar="RUN", help=A_RUN)


def run(given: argparse.Namespace) -> None:
    root = root_of(given.folder)
    if not isinstance(root, Path):
        raise ConfigError(
            f"{root} is on object storage, where a run removes the leftovers of its killed "
            "jobs when it starts: restart the run"
        )
    with alone_in(root):
        removed, problems = clear_leftovers(root)
        for path in removed:
            print(f"removed {path}")
        newest, damaged = find_intact(root)
        for reason in damaged:
            print(f"skipped: {reason}")
        if newest is None:
            raise CheckpointError(f"{root} has no intact checkpoint")
        if pointer_of(root) != newest.name:
            point_at(root, newest.name)
            print(f"{root / POINTER} now names {newest.name}")
    if problems:
        raise CheckpointError("; ".join(problems))
    print(f"{root}: the newest intact checkpoint is {newest.name}")
