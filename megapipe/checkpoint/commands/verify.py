"""Reads all of some checkpoints: every piece against its checksum, with --values also every value,
which should be a finite number. All are read before damage ends the command with code 5.

example: checkpoint.py verify runs/latest --values
"""

import argparse

from megapipe.checkpoint.commands.arguments import A_RUN, folders_at, place, size_of
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.command_line import Parser
from megapipe.errors import CheckpointError
from megapipe.words import count_noun, print_folded

PURPOSE = "read all of checkpoints and compare checksums"


def add(parser: Parser) -> None:
    parser.add_argument(
        "paths", type=place, nargs="+", metavar="PATH", help=f"a checkpoint, {A_RUN}"
    )
    parser.add_argument("--values", action="store_true", help="find values that are not finite")


def run(given: argparse.Namespace) -> None:
    folders = [folder for path in given.paths for folder in folders_at(path)]
    bad = 0
    for folder in folders:
        try:
            print_folded(f"{folder}: {_read(folder, values=given.values)}")
        except CheckpointError as error:
            bad += 1
            print_folded(f"{folder}: DAMAGED: {error}")
    if bad:
        raise CheckpointError(f"{bad} of {count_noun(len(folders), 'checkpoint')} cannot be used")


def _read(folder: StorageLocation, *, values: bool) -> str:
    checkpoint = Checkpoint.open(folder)
    checkpoint.verify()
    if values:
        for name in checkpoint.names():
            tensor = checkpoint.read(name)
            if odd := int((~tensor.isfinite()).sum()):
                raise CheckpointError(
                    f"{name} has {count_noun(odd, 'value')} of {tensor.numel():,} that "
                    f"{'is' if odd == 1 else 'are'} not finite"
                )
    files = checkpoint.manifest.files
    size = size_of(sum(record.bytes for record in files.values()))
    return (
        f"sound, {count_noun(len(files), 'file')}, {size}{', all values finite' if values else ''}"
    )
