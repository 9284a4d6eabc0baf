"""``export``: write one schedule as text."""

import argparse
from pathlib import Path

from megapipe.command_line import Commands, Parser
from megapipe.schedule.commands.arguments import add_name, add_setting, write
from megapipe.schedule.commands.scenario import Scenario
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.text import to_csv, to_torch_csv

FORMATS = {"csv": to_csv, "torch": to_torch_csv}


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser("export", help="write one schedule as text")
    add_name(parser)
    add_setting(parser)
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="csv",
        help="csv: a row per rank, a cell per operation (the default); torch: the same, but an "
        "error if torch.distributed.pipelining cannot run the schedule",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="file to write (standard output)"
    )
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    schedule, _ = Scenario.of(given).build(given.name)
    validate(schedule)
    text = FORMATS[given.format](schedule)
    if given.output is None:
        print(text, end="")
    else:
        write(given.output, lambda path: path.write_text(text, encoding="utf-8"))
        print(given.output)
