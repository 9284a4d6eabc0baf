"""Output of commands for other programs: JSON or CSV."""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megapipe.command_line import Parser


def add_forms(parser: Parser, of_csv: str) -> None:
    """Add the options --json and --csv; `of_csv`: help text of --csv."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help=of_csv)
    form.add_argument("--json", action="store_true", help="print the same as a JSON list")


def print_list(given: argparse.Namespace, records: Sequence[Mapping[str, Any]]) -> bool:
    """Print records, all with equal keys, as JSON or CSV; return False if neither is requested."""
    if given.json:
        print(json.dumps(records))
    elif given.csv:
        writer = csv.DictWriter(sys.stdout, tuple(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return bool(given.json or given.csv)
