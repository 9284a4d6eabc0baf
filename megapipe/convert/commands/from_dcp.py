"""Writes the weights in a folder of torch.distributed.checkpoint (DCP) as a run folder with one
checkpoint of step 0, and a configuration that starts from the checkpoint. The tensors in the DCP
folder have the names of a Hugging Face class, of torchtitan's Llama or of megapipe. The folder's
index is pickled: an index that could run code is refused, unless it is trusted.

example: convert.py dcp-to-megapipe outputs/checkpoint/step-1000 runs/mine --config ./Llama-3.1-8B
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

PURPOSE = "convert a torch.distributed.checkpoint folder to a checkpoint"


def add(parser: Parser) -> None:
    parser.add_argument("source", type=Path, metavar="FOLDER", help="a folder with a .metadata")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="run folder to make")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="the model: a Hugging Face config.json, a folder with one, or a YAML "
        "configuration with a section model (default: one of these in FOLDER)",
    )
    parser.add_argument(
        "--prefix", default="", metavar="NAME.", help="prefix of the tensors' names, e.g. model."
    )
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer, as in data.tokenizer (default: the tokenizer files in FOLDER)",
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
    import_model(
        source, given.output, tokenizer=given.tokenizer, shard_bytes=most, report=print_progress
    )
    print(f"{given.output}: a checkpoint, and {CONFIGURATION} for train.py")
