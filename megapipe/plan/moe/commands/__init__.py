"""The commands of scripts/experts.py, one file each."""

from collections.abc import Sequence

from megapipe.command_line import Parser, parser_of, run_command
from megapipe.plan.moe.commands import plan, show, simulate

COMMANDS = {"simulate": simulate, "show": show, "plan": plan}


def parser() -> Parser:
    """The parser of all commands."""
    return parser_of(
        COMMANDS,
        description="Layers with experts over several ranks: what exchanging their rows takes, "
        "which experts a run has chosen, and which ranks should have them. docs/moe.md explains.",
        epilog="%(prog)s COMMAND --help tells what it takes.",
    )


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    return run_command(parser(), argv)
