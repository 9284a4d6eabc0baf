"""Command line: what each method chooses for one block, with collectives, bytes and errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import chain

from examples.sharding.report import Sizes, plans
from examples.sharding.report_runs import runs
from megapipe.errors import ConfigError


def main(words: Sequence[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Print the report; return the exit code."""
    parser = argparse.ArgumentParser("python -m examples.sharding", description=__doc__)
    for name, default in zip(Sizes._fields, (16, 4, 4, 8), strict=True):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    sizes = Sizes(**vars(parser.parse_args(words)))
    try:
        for line in chain(plans(sizes), runs(sizes)):
            say(line)
    except ConfigError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
