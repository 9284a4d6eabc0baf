"""Pipeline schedules: ``python scripts/schedule.py --help``; docs/schedules.md explains."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megapipe.schedule.commands import main
from megapipe.schedule.cost import Cost
from megapipe.schedule.placement import Placement


def planner(path: Path) -> Callable[[Placement], Cost]:
    """The costs of the stages of the model that a file configures, on any placement."""
    from megapipe.cli import parse
    from megapipe.layout.costs import placement_cost
    from megapipe.layout.resolve import resolve

    config, _ = resolve(parse([str(path)]).config, None, None, where=str(path))
    return partial(placement_cost, config)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], planner))
