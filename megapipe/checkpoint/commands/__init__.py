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
    """The parser of all commands."""
    return parser_of(
        COMMANDS,
        description="The checkpoints of a run: which there are, what they hold, whether they are "
        "sound.",
        epilog="%(prog)s COMMAND --help tells what it takes.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    return run_command(parser(), argv)
