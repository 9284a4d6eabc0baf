"""Pipeline schedules: ``python scripts/schedule.py --help``; docs/schedules.md explains."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megapipe.command_line import quiet_interrupts

if TYPE_CHECKING:
    from collections.abc import Callable

    from megapipe.schedule.cost import Cost
    from megapipe.schedule.placement import Placement


def planner(path: Path) -> "Callable[[Placement], Cost]":
    """Return the costs of the stages of the model that a file configures, on any placement."""
    from functools import partial

    from megapipe.cli import parse
    from megapipe.layout.costs import placement_cost
    from megapipe.layout.resolve import resolve

    config, _ = resolve(parse([str(path)]).config, None, None, where=str(path))
    return partial(placement_cost, config)


if __name__ == "__main__":
    with quiet_interrupts():
        from megapipe.schedule.commands import main

        sys.exit(main(sys.argv[1:], planner))
