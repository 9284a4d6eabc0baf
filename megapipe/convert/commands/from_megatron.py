"""Writes the weights of a checkpoint of Megatron-LM's GPT, of its older format (a file for each
rank) or of torch_dist, as a run folder with one checkpoint of step 0, and a configuration that
begins from it. These files are pickled: what could run code is refused, unless it is trusted.

example: convert.py megatron-to-megapipe checkpoints runs/mine --tokenizer ./tokenizer
"""

import argparse
from pathlib import Path

from megapipe.command_line import Parser
from megapipe.convert.adopt import CONFIGURATION, import_model
from megapipe.convert.commands.arguments import (
    add_shard_gb,
    add_trust,
    be_quiet,
    shard_bytes,
    tell,
)

PURPOSE = "a checkpoint of Megatron-LM's to a checkpoint"


def add(parser: Parser) -> None:
    parser.add_argument(
        "source", type=Path, metavar="FOLDER", help="what --save named there, or an iteration in it"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="run folder to make")
    parser.add_argument("--tokenizer", metavar="NAME", help="as data.tokenizer; FOLDER has none")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="rows of the vocabulary to keep: the tokenizer's, without the padding (default: all, "
        "which is the model as it was trained)",
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
    import_model(source, given.output, tokenizer=given.tokenizer, shard_bytes=most, tell=tell)
    print(f"{given.output}: a checkpoint, and {CONFIGURATION} for train.py")
