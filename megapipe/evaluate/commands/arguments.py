"""Options and output that the evaluation commands share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from megapipe.command_line import Parser
from megapipe.errors import ConfigError
from megapipe.text import print_folded
from megapipe.util import heartbeat


def add_common(parser: Parser) -> None:
    """Add the options for batch size and output."""
    parser.add_argument("--batch", type=int, default=8, help="rows per forward (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def batch_of(given: argparse.Namespace) -> int:
    """Return the number of sequences in a batch, from ``--batch``. Raises :class:`ConfigError`."""
    if given.batch < 1:
        raise ConfigError(f"--batch {given.batch}: expected at least 1")
    return int(given.batch)


def report_rows(given: argparse.Namespace, lines: Iterable[str]) -> None:
    """Print on rank 0 the `lines` on how many input records were left out or changed."""
    if given.mesh.rank == 0:
        for line in lines:
            heartbeat.print_notice(line)


def show(given: argparse.Namespace, line: str, found: dict[str, Any]) -> None:
    """Print a result on rank 0: `found` as JSON with ``--json``, else `line`."""
    if given.mesh.rank:
        return
    if given.json:
        print(json.dumps(found), flush=True)
    else:
        print_folded(line)
