"""The commands of scripts/context.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.plan.commands import compare, draw

COMMANDS = {"compare": compare, "draw": draw}


def parser() -> Parser:
    """Return the parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Show how context-parallel ranks attend (context.*): costs, and which rank "
        "computes which tile in which round. docs/context.md explains.",
        epilog="%(prog)s COMMAND --help explains a command.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code of the process."""
    return run_command(parser(), argv)
