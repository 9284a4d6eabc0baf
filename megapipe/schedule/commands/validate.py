"""``validate``: prove that the schedule of a file can be executed."""

import argparse
import json
from pathlib import Path

from megapipe.command_line import Commands, Parser
from megapipe.errors import ConfigError
from megapipe.schedule.commands.measure import describe
from megapipe.schedule.text import from_csv
from megapipe.text import print_folded


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser(
        "validate", help="prove that the schedule of a file can be executed"
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a file as `export` writes it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    try:
        text = given.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{given.file}: {reason}") from None
    schedule = from_csv(text, name=str(given.file))
    facts = describe(schedule)
    if given.json:
        print(json.dumps(facts))
        return
    order = "" if facts["bitwise_order"] else "NOT "
    print_folded(
        f"{given.file}: valid: {facts['ranks']} ranks, {facts['microbatches']:g} micro-batches, "
        f"chunks {facts['chunks']}, placement {facts['placement']}, {facts['ops']:,} operations, "
        f"{facts['messages']:,} messages; at most {max(facts['peak_held']):g} micro-batches of a "
        f"full rank held; gradients {order}in micro-batch order"
    )
