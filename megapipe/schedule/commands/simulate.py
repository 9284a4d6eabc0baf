"""``simulate``: prove that one schedule can be executed, and time it."""

import argparse
import json

from megapipe.command_line import Commands, Parser
from megapipe.schedule.commands.arguments import add_name, add_setting, count
from megapipe.schedule.commands.measure import lines, measure
from megapipe.schedule.commands.scenario import Scenario, json_number
from megapipe.text import print_folded


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser("simulate", help="prove and time one schedule")
    add_name(parser)
    add_setting(parser)
    parser.add_argument(
        "--out-of-order",
        type=count,
        metavar="N",
        help="also time ranks that run one of the N next operations if the next one has to wait "
        "(Varuna, 2111.04007)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    setting = Scenario.of(given)
    schedule, seconds = setting.build(given.name)
    result = measure(setting, schedule, seconds)
    if given.out_of_order:
        result["deviating"] = {
            "window": given.out_of_order,
            "makespan": json_number(setting.time(schedule, window=given.out_of_order).makespan),
        }
    if given.json:
        print(json.dumps(result))
    else:
        print_folded(*lines(result))
