"""The commands of ``megapipe config``, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.config.commands import upgrade

COMMANDS = {"upgrade": upgrade}


def parser() -> Parser:
    """Return the parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Configuration files.",
        epilog="%(prog)s COMMAND --help explains a command.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command. Return the exit code of the process."""
    return run_command(parser(), argv)
