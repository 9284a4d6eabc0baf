"""Writes a model of Hugging Face's as a run folder with one checkpoint of weights, of step 0, and a
configuration that begins from it. (checkpoint.load takes such a model as it is, too.)

example: convert.py hf-to-megapipe Qwen/Qwen3-0.6B runs/qwen
"""

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.convert.adopt import CONFIGURATION, import_model
from megapipe.convert.commands.arguments import add_shard_gb, be_quiet, shard_bytes, tell
from megapipe.convert.folder import HuggingFaceFolder
from megapipe.convert.hub import local_folder

PURPOSE = "a folder of Hugging Face's, or a name on the hub, to a checkpoint"


def add(parser: Parser) -> None:
    parser.add_argument("source", metavar="FOLDER", help="local folder, or a name on the hub")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="run folder to make")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="as data.tokenizer (default: the folder's own)"
    )
    add_shard_gb(parser, 2, also=", and in memory")


def run(given: argparse.Namespace) -> None:
    be_quiet()
    most = shard_bytes(given)
    source = HuggingFaceFolder.open(local_folder(given.source))
    if source.files.note is not None:
        tell(source.files.note)
    import_model(source, given.output, tokenizer=given.tokenizer, shard_bytes=most, tell=tell)
    print(f"{given.output}: a checkpoint, and {CONFIGURATION} for train.py")
