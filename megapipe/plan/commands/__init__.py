"""The commands of scripts/context.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.plan.commands import compare, draw

COMMANDS = {"compare": compare, "draw": draw}


def parser() -> Parser:
    """The parser of all commands."""
    return parser_of(
        COMMANDS,
        description="How ranks attend to positions that are split over them (context.*): what it "
        "costs, and who computes what when. docs/context.md explains.",
        epilog="%(prog)s COMMAND --help tells what it takes.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    return run_command(parser(), argv)
