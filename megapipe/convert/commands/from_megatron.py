"""Writes the weights of a Megatron-LM GPT checkpoint as a run folder with one checkpoint of step 0,
and a configuration that starts from the checkpoint. Megatron-LM's older format (a file for each
rank) and torch_dist can be read. Their files are pickled: a file that could run code is refused,
unless it is trusted.

example: convert.py megatron-to-megapipe checkpoints runs/mine --tokenizer ./tokenizer
"""

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.convert.commands.arguments import (
    add_shard_gb,
    add_trust,
    be_quiet,
    print_progress,
    shard_bytes,
)
from megapipe.convert.import_model import CONFIGURATION, import_model

PURPOSE = "convert a Megatron-LM checkpoint to a checkpoint"


def add(parser: Parser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="FOLDER",
        help="the folder that Megatron-LM's --save named, or an iteration in it",
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="run folder to make")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="as data.tokenizer (FOLDER contains no tokenizer)"
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of the vocabulary to keep: the size of the tokenizer, without padding "
        "(default: all rows, as trained)",
    )
    add_trust(parser)
    add_shard_gb(parser, 2, also=", and in memory")


def run(given: argparse.Namespace) -> None:
    from megapipe.convert.megatron.folder import MegatronFolder

    be_quiet()
    most = shard_bytes(given)
    source = MegatronFolder.open(
        given.source, vocab_size=given.vocab_size, trust=given.trust_pickle
    )
    import_model(
        source, given.output, tokenizer=given.tokenizer, shard_bytes=most, report=print_progress
    )
    print(f"{given.output}: a checkpoint, and {CONFIGURATION} for train.py")
