"""The commands of scripts/convert.py, one file each."""

import argparse
from collections.abc import Sequence

from megapipe.command_line import Parser, run_command
from megapipe.convert.commands import from_hf, inspect, to_hf

COMMANDS = {"hf-to-megapipe": from_hf, "megapipe-to-hf": to_hf, "inspect": inspect}


def parser() -> Parser:
    """The parser of all commands; each sets `run`, a function of the parsed arguments."""
    top = Parser(
        description="Models from Hugging Face's form to checkpoints and back; no GPU, no launcher.",
        epilog="%(prog)s COMMAND --help tells what it takes.",
    )
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.PURPOSE,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add(command)
        command.set_defaults(run=module.run)
    return top


def main(argv: Sequence[str]) -> int:
    """Run one command; the exit code of the process."""
    return run_command(parser(), argv)
