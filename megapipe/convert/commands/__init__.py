"""The commands of scripts/convert.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.convert.commands import from_hf, inspect, to_hf

COMMANDS = {"hf-to-megapipe": from_hf, "megapipe-to-hf": to_hf, "inspect": inspect}


def parser() -> Parser:
    """The parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Models from Hugging Face's form to checkpoints and back; no GPU, no launcher.",
        epilog="%(prog)s COMMAND --help tells what it takes.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    return run_command(parser(), argv)
