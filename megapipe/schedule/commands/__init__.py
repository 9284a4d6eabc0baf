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
"""From a configuration to the costs of its model's stages on a placement."""

COMMANDS = (listing, show, simulate, compare, draw, validate, export, search)


def parser() -> Parser:
    """The parser of all commands; each sets `run`, a function of the parsed arguments."""
    top = Parser(
        description="Pipeline schedules: list, draw, prove, time, compare and search them.",
        epilog="%(prog)s COMMAND --help tells what a command takes.",
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for module in COMMANDS:
        module.add(commands)
    return top


def main(argv: Sequence[str], planner: Planner | None = None) -> int:
    """Run one command; the exit code of the process. `planner` reads what --config names."""
    return run_command(parser(), argv, planner=planner)
