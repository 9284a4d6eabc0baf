"""Options and output that commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from megapipe.command_line import Parser
from megapipe.errors import ConfigError
from megapipe.util import heartbeat
from megapipe.words import print_folded


def add_common(parser: Parser) -> None:
    """Add the options for batches and output."""
    parser.add_argument(
        "--batch", type=int, default=8, help="rows that are read side by side (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print an object in JSON")


def batch_of(given: argparse.Namespace) -> int:
    """Rows side by side; raises :class:`ConfigError`."""
    if given.batch < 1:
        raise ConfigError(f"--batch {given.batch}: expected at least 1")
    return int(given.batch)


def tell_rows(given: argparse.Namespace, lines: Iterable[str]) -> None:
    """Tell what of the rows of a file was left out or replaced, on the first rank."""
    if given.mesh.rank == 0:
        for line in lines:
            heartbeat.print_notice(line)


def show(given: argparse.Namespace, line: str, found: dict[str, Any]) -> None:
    """Print a result, on the first rank."""
    if given.mesh.rank:
        return
    if given.json:
        print(json.dumps(found), flush=True)
    else:
        print_folded(line)
