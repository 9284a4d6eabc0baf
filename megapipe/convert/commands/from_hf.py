"""Writes a Hugging Face model as a run folder with one checkpoint of step 0, which has only
weights, and a configuration that starts from the checkpoint. (checkpoint.load also takes such a
model directly.)

example: convert.py hf-to-megapipe Qwen/Qwen3-0.6B runs/qwen
"""

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.convert.commands.arguments import add_shard_gb, be_quiet, print_progress, shard_bytes
from megapipe.convert.folder import HuggingFaceFolder
from megapipe.convert.import_model import CONFIGURATION, import_model
from megapipe.model.hub import local_folder

PURPOSE = "convert a Hugging Face folder, or a name on the hub, to a checkpoint"


def add(parser: Parser) -> None:
    parser.add_argument("source", metavar="FOLDER", help="local folder, or a name on the hub")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="run folder to make")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="as data.tokenizer (default: the one in FOLDER)"
    )
    add_shard_gb(parser, 2, also=", and in memory")


def run(given: argparse.Namespace) -> None:
    be_quiet()
    most = shard_bytes(given)
    source = HuggingFaceFolder.open(local_folder(given.source))
    if source.files.note is not None:
        print_progress(source.files.note)
    import_model(
        source, given.output, tokenizer=given.tokenizer, shard_bytes=most, report=print_progress
    )
    print(f"{given.output}: a checkpoint, and {CONFIGURATION} for train.py")
