"""Writes the weights of a checkpoint, of any layout, as a folder for transformers: safetensors with
an index, config, generation config and tokenizer. The tokenizer begins each text with the same
token as generate.py.

example: convert.py megapipe-to-hf runs/latest my_model
"""

import argparse
from pathlib import Path
from typing import get_args

from megapipe.checkpoint.commands.arguments import location
from megapipe.checkpoint.find import find_checkpoint
from megapipe.command_line import Parser
from megapipe.convert.adapters import export_adapters
from megapipe.convert.commands.arguments import (
    add_model_type,
    add_shard_gb,
    be_quiet,
    print_progress,
    shard_bytes,
)
from megapipe.convert.export import NO_TOKENIZER, export
from megapipe.util.dtypes import Dtype

PURPOSE = "convert a checkpoint to a folder that AutoModelForCausalLM and AutoTokenizer load"


def add(parser: Parser) -> None:
    parser.add_argument(
        "path", type=location, metavar="PATH", help="a checkpoint, or a run folder (its newest one)"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to make")
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="type of the weights (default: the model's; master weights are in fp32)",
    )
    add_model_type(parser)
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help=f"as data.tokenizer (default: the run's); {NO_TOKENIZER}: write none",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write only the adapters, as peft loads them (default: merge them into the weights)",
    )
    add_shard_gb(parser, 5)


def run(given: argparse.Namespace) -> None:
    be_quiet()
    most = shard_bytes(given)
    checkpoint = find_checkpoint(given.path, verify=False)
    kind = {"dtype": given.dtype, "model_type": given.model_type}
    if given.adapter:
        export_adapters(checkpoint, given.output, **kind, report=print_progress)
    else:
        export(
            checkpoint,
            given.output,
            **kind,
            shard_bytes=most,
            tokenizer=given.tokenizer,
            report=print_progress,
            warn=print_progress,
        )
    print(f"{given.output}: step {checkpoint.step} of {checkpoint.path}")
