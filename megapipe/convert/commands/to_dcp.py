"""Writes the weights of a checkpoint, of any layout, as a folder that
torch.distributed.checkpoint.load reads. Tensors have the names of a Hugging Face class's state
dict, with its config.json, or megapipe's names.

example: convert.py megapipe-to-dcp runs/latest my_model_dcp
"""

import argparse
from pathlib import Path
from typing import get_args

from megapipe.checkpoint.commands.arguments import location
from megapipe.checkpoint.find import find_checkpoint
from megapipe.command_line import Parser
from megapipe.convert.commands.arguments import add_model_type, be_quiet, print_progress
from megapipe.util.dtypes import Dtype

PURPOSE = "convert a checkpoint to a torch.distributed.checkpoint folder"


def add(parser: Parser) -> None:
    parser.add_argument(
        "path", type=location, metavar="PATH", help="a checkpoint, or a run folder (its newest one)"
    )
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder to make")
    parser.add_argument(
        "--names",
        choices=("hf", "megapipe"),
        help="names of the tensors (default: hf if a Hugging Face class can express the "
        "model, else megapipe)",
    )
    parser.add_argument(
        "--dtype",
        choices=get_args(Dtype),
        help="type of the weights (default: the model's; master weights are in fp32)",
    )
    add_model_type(parser)


def run(given: argparse.Namespace) -> None:
    from megapipe.convert.dcp.export import export_dcp

    be_quiet()
    checkpoint = find_checkpoint(given.path, verify=False)
    export_dcp(
        checkpoint,
        given.output,
        names=given.names,
        dtype=given.dtype,
        model_type=given.model_type,
        report=print_progress,
    )
    print(f"{given.output}: step {checkpoint.step} of {checkpoint.path}")
