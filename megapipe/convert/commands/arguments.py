"""Options and output that the conversion commands share."""

import argparse
import os
import sys
from math import isfinite

from megapipe.command_line import Parser
from megapipe.convert.pickles import TRUST, TRUST_MEANS
from megapipe.errors import ConfigError
from megapipe.model.gpt.hf.table import TABLE

GB = 10**9


def be_quiet() -> None:
    """Silence transformers' progress bars and hints. Call this before transformers is imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def add_shard_gb(parser: Parser, default: float, also: str = "") -> None:
    """Add the option --shard-gb for the size of files; `also` continues its help text."""
    parser.add_argument(
        "--shard-gb",
        type=float,
        default=default,
        metavar="GB",
        help=f"maximum GB (10^9 bytes) per file{also} (default: %(default)s)",
    )


def add_model_type(parser: Parser) -> None:
    """Add the option for the Hugging Face class that the model is written as."""
    parser.add_argument(
        "--model-type",
        choices=list(TABLE),
        metavar="TYPE",
        help=f"{', '.join(TABLE)} (default: the first that can express the model)",
    )


def add_trust(parser: Parser) -> None:
    """Add the option that lets pickled files run code."""
    parser.add_argument(TRUST, action="store_true", help=TRUST_MEANS)


def shard_bytes(given: argparse.Namespace) -> int:
    """Return --shard-gb in bytes. Raises :class:`ConfigError`."""
    if not (isfinite(given.shard_gb * GB) and given.shard_gb > 0):
        raise ConfigError(f"--shard-gb {given.shard_gb}: expected a number > 0")
    return max(1, int(given.shard_gb * GB))


def print_progress(line: str) -> None:
    """Print a line of progress."""
    print(f"megapipe: {line}", file=sys.stderr, flush=True)
