"""Lists the checkpoints of a run, oldest first. A checkpoint is called sound here if its manifest
is valid and its files are there at their lengths; `verify` reads them.

example: checkpoint.py list runs/latest
"""

import argparse

from megapipe.checkpoint.commands.arguments import (
    A_RUN,
    layout_of,
    place,
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
from megapipe.words import count_noun, table

PURPOSE = "checkpoints of a run"


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=place, metavar="RUN", help=A_RUN)


def run(given: argparse.Namespace) -> None:
    root = root_of(given.folder)
    rows = [_row(root / key.name) for key in reversed(committed(root))]
    print(f"{root}: {count_noun(len(rows), 'checkpoint')}")
    if rows:
        print(table(rows, left=len(rows[0])))
    if (pointer := pointer_of(root)) is not None:
        gone = "" if at(root / pointer).is_checkpoint() else ", which is not there"
        print(f"{POINTER} names {pointer}{gone}")
    for leftover in leftovers(root):
        print(f"{leftover.name}: being written or removed, or left behind by a process that ended")


def _row(path: StorageLocation) -> tuple[str, ...]:
    try:
        checkpoint = Checkpoint.open(path)
    except CheckpointError as error:
        return path.name, written(path), "-", "-", f"damaged: {error}"
    kind = "sound" if checkpoint.has_state else "sound, weights alone"
    size = size_of(sum(record.bytes for record in checkpoint.manifest.files.values()))
    return path.name, written(path), size, layout_of(checkpoint), kind
