"""Lists the checkpoints of a run, oldest first. A checkpoint is listed as intact if its manifest is
valid and its files exist with the right lengths. The command `verify` also reads the files.

example: checkpoint.py list runs/latest
"""

import argparse

from megapipe.checkpoint.commands.arguments import (
    A_RUN,
    layout_of,
    location,
    pointer_of,
    root_of,
    size_of,
    written,
)
from megapipe.checkpoint.folders import committed, leftovers
from megapipe.checkpoint.names import POINTER
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation, at
from megapipe.command_line import Parser
from megapipe.errors import CheckpointError
from megapipe.text import count_noun, table

PURPOSE = "list the checkpoints of a run"


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=location, metavar="RUN", help=A_RUN)


def run(given: argparse.Namespace) -> None:
    root = root_of(given.folder)
    rows = [_row(root / key.name) for key in reversed(committed(root))]
    print(f"{root}: {count_noun(len(rows), 'checkpoint')}")
    if rows:
        print(table(rows, left=len(rows[0])))
    if (pointer := pointer_of(root)) is not None:
        gone = "" if at(root / pointer).is_checkpoint() else ", which does not exist"
        print(f"{POINTER} names {pointer}{gone}")
    for leftover in leftovers(root):
        print(
            f"{leftover.name}: being written or removed now, or a leftover of a process that ended"
        )


def _row(path: StorageLocation) -> tuple[str, ...]:
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        return path.name, written(path), "-", "-", f"damaged: {error}"
    kind = "intact" if checkpoint.has_state else "intact, weights only"
    size = size_of(sum(record.bytes for record in checkpoint.manifest.files.values()))
    return path.name, written(path), size, layout_of(checkpoint), kind
