"""``compare``: a table of schedules at the same sizes and costs."""

import argparse
import csv
import json
import sys
from typing import Any

from megapipe import text
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
"""Heading of each column in the text table, by the column's name in --sort and CSV."""
SHARES = ("bubble", "bubble_ideal", "bubble_span")


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser(
        "compare",
        help="a table of schedules at one setting",
        description="A table of schedules at one setting. A schedule that lacks an option, such as "
        "--sequence-slices or --microbatch-group-size, is built without it. A schedule that "
        "refuses the setting is listed with the reason.",
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
        help=f"sort by one of {', '.join(COLUMNS)} (the --objective)",
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
    measured.sort(
        key=lambda result: (row(result)[given.sort or setting.objective], result["schedule"])
    )
    if given.json:
        failed = [{"schedule": name, "refused": reason} for name, reason in refused.items()]
        print(json.dumps([*measured, *failed]))
    elif given.csv:
        writer = csv.DictWriter(sys.stdout, (*COLUMNS, "refused"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row(result) for result in measured)
        writer.writerows({"schedule": name, "refused": why} for name, why in refused.items())
    else:
        print(
            table([row(result) for result in measured], fits=setting.activation_limit is not None)
        )
        for name, reason in refused.items():
            text.print_folded(f"{name}: {reason}")


def row(result: dict[str, Any]) -> dict[str, Any]:
    """Convert a result of :func:`measure` to a line of the table, by column name. Figures per rank
    are replaced by their maximum."""
    bubble = result["bubble"]
    return {
        **{key: result[key] for key in ("schedule", "chunks", "makespan", "span", "messages")},
        "bubble": bubble["makespan"],
        "bubble_ideal": bubble["ideal"],
        "bubble_span": bubble["span"],
        "held": max(result["peak_held"]),
        "weighted": max(result["peak_weighted"]),
        "weights": max(result["weight_copies"]),
        "fits": result["fits"],
    }


def table(rows: list[dict[str, Any]], *, fits: bool) -> str:
    """Format rows as a text table, with the column `fits` only if `fits` is true."""
    keys = [key for key in COLUMNS if fits or key != "fits"]
    cells = [[COLUMNS[key] for key in keys]]
    cells += [[_cell(key, row[key]) for key in keys] for row in rows]
    return text.table(cells, left=1)


def _cell(key: str, value: Any) -> str:
    if key in SHARES:
        return f"{value:.1%}"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return value if isinstance(value, str) else f"{value:g}"
