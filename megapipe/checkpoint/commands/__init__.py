"""The commands of scripts/checkpoint.py, one file each."""

from collections.abc import Sequence

from megapipe.checkpoint.commands import delete, diff, inspect, listing, repair, verify
from megapipe.command_line import Parser, parser_of, run_command

COMMANDS = {
    "list": listing,
    "verify": verify,
    "inspect": inspect,
    "diff": diff,
    "delete": delete,
    "repair": repair,
}


def parser() -> Parser:
    """Return the parser of all commands."""
    return parser_of(
        COMMANDS,
        description="The checkpoints of a run: list, inspect, verify, compare, repair and delete "
        "them.",
        epilog="%(prog)s COMMAND --help explains a command.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code of the process."""
    return run_command(parser(), argv)
