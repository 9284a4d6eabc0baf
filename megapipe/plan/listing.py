"""Lists of commands for other programs: JSON or CSV."""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megapipe.command_line import Parser


def add_forms(parser: Parser, of_csv: str) -> None:
    """Add --csv, which does what its help says, and --json."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help=of_csv)
    form.add_argument("--json", action="store_true", help="print a JSON list of the same")


def print_list(given: argparse.Namespace, records: Sequence[Mapping[str, Any]]) -> bool:
    """Print records with the same keys in the form that is asked for; false if none is."""
    if given.json:
        print(json.dumps(records))
    elif given.csv:
        writer = csv.DictWriter(sys.stdout, tuple(records[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
    return bool(given.json or given.csv)
