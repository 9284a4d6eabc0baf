"""Lists every plan, order of positions and split of heads that a model and a number of ranks allow,
the fastest first: bytes that a rank sends per layer and micro-batch, forward and backward, within
its node and to others, and the time of attention by simulation. Speeds are those of
parallel.node_gb_s, network_gb_s and per_node, log.device and log.efficiency.

example: context.py compare configs/llama_8b.yaml parallel.cp=8 train.sequence_length=131072
"""

import argparse
from typing import Any

from megapipe import words
from megapipe.command_line import Parser
from megapipe.layout.speeds import known_speeds
from megapipe.plan.commands.arguments import add_configuration, configuration
from megapipe.plan.context_choice import ContextCost, costs
from megapipe.plan.context_row import row
from megapipe.plan.listing import add_forms, print_list

PURPOSE = "all ways to attend over split positions, with what they cost"


def add(parser: Parser) -> None:
    add_configuration(parser)
    add_forms(parser, "print CSV, bytes and seconds as numbers")


def run(given: argparse.Namespace) -> None:
    config = configuration(given)
    found = costs(config, known_speeds(config))
    if not print_list(given, [plain(cost) for cost in found]):
        print(table(found))
        keys = " ".join(found[0].keys) or "as by default"
        place = own_place(found, config.context)
        words.print_folded("", f"fastest: {keys}; this configuration: {place}")


def plain(cost: ContextCost) -> dict[str, Any]:
    """The row of a way to attend, in bytes and seconds."""
    return {
        **cost.context.model_dump(),
        **{key: value for key, value in vars(cost).items() if key not in ("context", "exposed")},
        **{f"exposed_{what}": seconds for what, seconds in cost.exposed.items()},
    }


def own_place(found: list[ContextCost], own: Any) -> str:
    """The place of a section among those that were found."""
    for number, cost in enumerate(found, start=1):
        if cost.context == own.model_copy(update={"travels": cost.context.travels}):
            return f"number {number} of {len(found)}"
    return "not among them"


def table(found: list[ContextCost]) -> str:
    """Rows for a reader."""
    rows = [row(cost) for cost in found]
    return words.table([list(rows[0]), *(list(each.values()) for each in rows)], left=2)
