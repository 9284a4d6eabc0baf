"""The commands of scripts/convert.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.convert.commands import from_dcp, from_hf, from_megatron, inspect, to_dcp, to_hf

COMMANDS = {
    "hf-to-megapipe": from_hf,
    "megapipe-to-hf": to_hf,
    "megatron-to-megapipe": from_megatron,
    "dcp-to-megapipe": from_dcp,
    "megapipe-to-dcp": to_dcp,
    "inspect": inspect,
}


def parser() -> Parser:
    """Return the parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Convert models of Hugging Face, Megatron-LM and torch.distributed.checkpoint "
        "to checkpoints, and checkpoints to Hugging Face and "
        "torch.distributed.checkpoint. Needs no GPU and no launcher.",
        epilog="%(prog)s COMMAND --help explains a command.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code of the process."""
    return run_command(parser(), argv)
