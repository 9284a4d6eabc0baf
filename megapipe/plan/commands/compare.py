"""Lists every algorithm, position split and split of heads that a model and a number of ranks
allow, the fastest first. It shows the bytes that a rank sends per layer and micro-batch, forward
and backward, within its node and to others, and the simulated time of attention. Speeds:
plan.intra_node_gb_s, plan.inter_node_gb_s, parallel.ranks_per_node, plan.device, plan.time_factor.

example: context.py compare configs/llama_8b.yaml parallel.cp=8 train.sequence_length=131072
"""

import argparse
from typing import Any

from megapipe import text
from megapipe.command_line import Parser
from megapipe.layout.speeds import known_speeds
from megapipe.plan.commands.arguments import add_configuration, configuration
from megapipe.plan.context_options import ContextCost, costs
from megapipe.plan.context_row import row
from megapipe.plan.listing import add_forms, print_list

PURPOSE = "list all context-parallel algorithms with their costs"


def add(parser: Parser) -> None:
    add_configuration(parser)
    add_forms(parser, "print CSV, in bytes and seconds")


def run(given: argparse.Namespace) -> None:
    config = configuration(given)
    found = costs(config, known_speeds(config))
    if not print_list(given, [plain(cost) for cost in found]):
        print(table(found))
        keys = " ".join(found[0].keys) or "as by default"
        position = own_position(found, config.context)
        text.print_folded("", f"fastest: {keys}; this configuration: {position}")


def plain(cost: ContextCost) -> dict[str, Any]:
    """Return a context-parallel option as a JSON or CSV record, in bytes and seconds."""
    return {
        **cost.context.model_dump(),
        **{key: value for key, value in vars(cost).items() if key not in ("context", "exposed")},
        **{f"exposed_{what}": seconds for what, seconds in cost.exposed.items()},
    }


def own_position(found: list[ContextCost], own: Any) -> str:
    """Describe the position of the configured section `context` among the sorted options."""
    for number, cost in enumerate(found, start=1):
        if cost.context == own.model_copy(
            update={"backward_circulates": cost.context.backward_circulates}
        ):
            return f"number {number} of {len(found)}"
    return "not among them"


def table(found: list[ContextCost]) -> str:
    """Format the options as a table with headings."""
    rows = [row(cost) for cost in found]
    return text.table([list(rows[0]), *(list(each.values()) for each in rows)], left=2)
