"""The commands of scripts/experts.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.plan.moe.commands import rebalance, show, simulate

COMMANDS = {"simulate": simulate, "show": show, "rebalance": rebalance}


def parser() -> Parser:
    """Return the parser of all commands."""
    return parser_of(
        COMMANDS,
        description="MoE layers over several ranks: simulate their dispatch, show which experts a "
        "run chose, and find better ranks for the experts. docs/moe.md explains.",
        epilog="%(prog)s COMMAND --help explains a command.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code of the process."""
    return run_command(parser(), argv)
