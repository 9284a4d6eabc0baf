"""``simulate``: prove and time one schedule."""

import argparse
import json

from megapipe.schedule.commands.arguments import NAME_HELP, Commands, Parser, add_setting
from megapipe.schedule.commands.measure import lines, measure
from megapipe.schedule.commands.scenario import Scenario


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser("simulate", help="prove and time one schedule")
    parser.add_argument("name", metavar="NAME", help=NAME_HELP)
    add_setting(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    setting = Scenario.of(given)
    told = measure(setting, *setting.build(given.name))
    print(json.dumps(told) if given.json else "\n".join(lines(told)))
