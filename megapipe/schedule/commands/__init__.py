"""The commands of ``megapipe schedule`` and scripts/schedule.py, one file each."""

from collections.abc import Callable, Sequence
from pathlib import Path

from megapipe.command_line import Parser, run_command
from megapipe.schedule.commands import (
    compare,
    draw,
    export,
    listing,
    search,
    show,
    simulate,
    validate,
)
from megapipe.schedule.cost import Cost
from megapipe.schedule.placement import Placement

Planner = Callable[[Path], Callable[[Placement], Cost]]
"""Function of a configuration file. It returns a function from placements to costs of stages."""

COMMANDS = (listing, show, simulate, compare, draw, validate, export, search)


def parser() -> Parser:
    """Return the parser of all commands. A command's function is the parsed argument `run`."""
    top = Parser(
        description="Pipeline schedules: list, draw, prove, time, compare and search them.",
        epilog="%(prog)s COMMAND --help lists the arguments of a command.",
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for module in COMMANDS:
        module.add(commands)
    return top


def main(argv: Sequence[str], planner: Planner | None = None) -> int:
    """Run one command; return the exit code. `planner` reads the configuration of --config."""
    return run_command(parser(), argv, planner=planner)
