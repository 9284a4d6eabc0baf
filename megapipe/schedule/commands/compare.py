"""``compare``: schedules at one setting, in one table."""

import argparse
import csv
import json
import sys
from typing import Any

from megapipe import words
from megapipe.command_line import Commands, Parser, suggest
from megapipe.errors import ScheduleError
from megapipe.schedule.commands.arguments import NAME_HELP, add_setting
from megapipe.schedule.commands.measure import measure
from megapipe.schedule.commands.scenario import Scenario
from megapipe.schedule.generators import names

COLUMNS = {
    "schedule": "",
    "chunks": "chunks",
    "makespan": "makespan",
    "span": "longest span",
    "bubble": "bubble",
    "bubble_ideal": "of ideal",
    "bubble_span": "of span",
    "held": "held",
    "weighted": "weighted",
    "weights": "weights",
    "messages": "messages",
    "fits": "fits",
}
"""Heading by key; --sort takes the keys, and the CSV has them."""
SHARES = ("bubble", "bubble_ideal", "bubble_span")


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser(
        "compare",
        help="a table of schedules at one setting",
        description="A table of schedules at one setting. Those that have no --chunks, --slices, "
        "--group, --pairs or --replicas go without; those that refuse the setting are listed with "
        "the reason.",
    )
    given = parser.add_argument(
        "names", metavar="NAME", nargs="*", help=f"{NAME_HELP} (all of `list`)"
    )
    suggest(given, names)
    add_setting(parser)
    parser.add_argument(
        "--sort",
        choices=tuple(COLUMNS),
        metavar="COLUMN",
        help=f"by {', '.join(COLUMNS)} (--objective)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print CSV")
    form.add_argument("--json", action="store_true", help="print a JSON list of `simulate` objects")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    setting = Scenario.of(given)
    measured, refused = [], {}
    for name in given.names or names():
        try:
            measured.append(measure(setting, *setting.build(name, lenient=True)))
        except ScheduleError as error:
            refused[name] = str(error).removeprefix(f"schedule {name}: ")
    measured.sort(key=lambda told: (row(told)[given.sort or setting.objective], told["schedule"]))
    if given.json:
        failed = [{"schedule": name, "refused": reason} for name, reason in refused.items()]
        print(json.dumps([*measured, *failed]))
    elif given.csv:
        writer = csv.DictWriter(sys.stdout, (*COLUMNS, "refused"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row(told) for told in measured)
        writer.writerows({"schedule": name, "refused": why} for name, why in refused.items())
    else:
        print(table([row(told) for told in measured], fits=setting.memory_limit is not None))
        for name, reason in refused.items():
            words.print_folded(f"{name}: {reason}")


def row(told: dict[str, Any]) -> dict[str, Any]:
    """The columns of a schedule; of values per rank, the largest."""
    bubble = told["bubble"]
    return {
        **{key: told[key] for key in ("schedule", "chunks", "makespan", "span", "messages")},
        "bubble": bubble["makespan"],
        "bubble_ideal": bubble["ideal"],
        "bubble_span": bubble["span"],
        "held": max(told["peak_held"]),
        "weighted": max(told["peak_weighted"]),
        "weights": max(told["weight_copies"]),
        "fits": told["fits"],
    }


def table(rows: list[dict[str, Any]], *, fits: bool) -> str:
    """Rows for a reader, with or without the column `fits`."""
    keys = [key for key in COLUMNS if fits or key != "fits"]
    cells = [[COLUMNS[key] for key in keys]]
    cells += [[_cell(key, row[key]) for key in keys] for row in rows]
    return words.table(cells, left=1)


def _cell(key: str, value: Any) -> str:
    if key in SHARES:
        return f"{value:.1%}"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return value if isinstance(value, str) else f"{value:g}"
