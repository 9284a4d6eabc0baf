"""Writes the weights of a folder of torch.distributed.checkpoint (DCP), by the names of Hugging
Face's classes, of torchtitan's Llama or of megapipe, as a run folder with one checkpoint of step 0,
and a configuration that begins from it. The index of such a folder is pickled: one that could run
code is refused, unless it is trusted.

example: convert.py dcp-to-megapipe outputs/checkpoint/step-1000 runs/mine --config ./Llama-3.1-8B
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

PURPOSE = "a folder of torch.distributed.checkpoint to a checkpoint"


def add(parser: Parser) -> None:
    parser.add_argument("source", type=Path, metavar="FOLDER", help="a folder with a .metadata")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="run folder to make")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="the model: a folder with a config.json of Hugging Face's, such a file, or a YAML "
        "configuration with a section model (default: one of these in FOLDER)",
    )
    parser.add_argument(
        "--prefix", default="", metavar="NAME.", help="beginning of the model's names, as in model."
    )
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="as data.tokenizer (default: files of one in FOLDER)"
    )
    add_trust(parser)
    add_shard_gb(parser, 2, also=", and in memory")


def run(given: argparse.Namespace) -> None:
    from megapipe.convert.dcp.folder import open_dcp

    be_quiet()
    most = shard_bytes(given)
    source = open_dcp(
        given.source, config=given.config, prefix=given.prefix, trust=given.trust_pickle
    )
    import_model(source, given.output, tokenizer=given.tokenizer, shard_bytes=most, tell=tell)
    print(f"{given.output}: a checkpoint, and {CONFIGURATION} for train.py")
