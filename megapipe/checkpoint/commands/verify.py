"""Reads checkpoints in full: it compares every piece with its checksum, and with --values checks
that every value is finite. Damage ends the command with code 5, after all checkpoints are read.

example: checkpoint.py verify runs/latest --values
"""

import argparse

from megapipe.checkpoint.commands.arguments import A_RUN, folders_at, location, size_of
from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.command_line import Parser
from megapipe.errors import CheckpointError
from megapipe.text import count_noun, print_folded

PURPOSE = "read every byte of checkpoints and compare checksums"


def add(parser: Parser) -> None:
    parser.add_argument(
        "paths", type=location, nargs="+", metavar="PATH", help=f"a checkpoint, {A_RUN}"
    )
    parser.add_argument(
        "--values", action="store_true", help="also look for values that are not finite"
    )


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
        f"intact, {count_noun(len(files), 'file')}, {size}{', all values finite' if values else ''}"
    )
