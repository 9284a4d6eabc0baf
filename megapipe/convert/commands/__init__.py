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
    """The parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Models of Hugging Face's, Megatron-LM's and torch's form to checkpoints, and "
        "back to the first and the last; no GPU, no launcher.",
        epilog="%(prog)s COMMAND --help tells what it takes.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    return run_command(parser(), argv)
