"""Lists every form of experts.dispatch (all_to_all, hierarchical, all_gather, fetch) for a layer
with experts, in 1 to 8 chunks and in each order, the fastest first: bytes that a rank sends
per layer and micro-batch, forward and backward, within its node and to others, and the time of
both by simulation. Speeds are those of parallel.node_gb_s, network_gb_s and per_node, log.device
and log.efficiency; of a device that is not known, such as a CPU, log.peak_tflops is needed. The
column "wait" is the longest that an exchange waits for dense gradients which are reduced meanwhile,
in pieces of optimizer.reduce_chunk_mib.

example: experts.py simulate configs/mixtral_8x7b.yaml parallel.per_node=4 --latency-us 20
"""

import argparse
from collections.abc import Sequence
from typing import Any

from megapipe.cli import parse
from megapipe.command_line import Parser
from megapipe.config.experts import ExpertsConfig
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import known_speeds
from megapipe.plan.commands.arguments import add_keys
from megapipe.plan.demand import milliseconds, size_text
from megapipe.plan.listing import add_forms, print_list
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.moe.choice import DispatchCost, costs
from megapipe.plan.moe.time import AssumedCosts
from megapipe.plan.units import Units
from megapipe.schedule.commands.arguments import count, none_or_more, number
from megapipe.words import divisors_hint, print_folded, ranges, table

PURPOSE = "all ways to exchange rows with experts, with what they cost"
HEADINGS = (
    *("dispatch", "chunks", "order", "in node", "to others"),
    *("F ms", "I ms", "exposed", "wait ms"),
)


def add(parser: Parser) -> None:
    add_keys(parser, "parallel.ep or parallel.etp")
    parser.add_argument(
        "--layer", type=none_or_more, metavar="N", help="one with experts (the first of them)"
    )
    parser.add_argument(
        "--latency-us",
        type=number,
        metavar="N",
        help="microseconds that an exchange of nothing takes (parallel.latency_us)",
    )
    parser.add_argument(
        "--copy-gb-s",
        type=number,
        default=0,
        metavar="N",
        help="GB/s at which a device reads and writes rows to put them in order (0: at once)",
    )
    parser.add_argument(
        "--rows", type=count, default=24, metavar="N", help="of the table (%(default)s)"
    )
    add_forms(parser, "print all as CSV, in bytes and seconds")


def run(given: argparse.Namespace) -> None:
    config, layout = resolve(parse(given.keys).config, None, None, measure=BY_UNITS)
    layer = layer_of(layout, given.layer)
    latency = config.parallel.latency_us if given.latency_us is None else given.latency_us
    assumed = AssumedCosts(float(latency) / 1e6, float(given.copy_gb_s))
    found = costs(Units(config, layout), known_speeds(config), layer, assumed)
    if not print_list(given, [plain(cost) for cost in found]):
        print_folded(
            f"layer {layer}: {config.model.moe.top_k} of {layout.model.experts()[layer]} experts "
            f"over {layout.ep_ranks} ranks, per micro-batch of "
            f"{config.train.microbatch} x {config.train.sequence_length} tokens"
        )
        print(table([HEADINGS, *map(_row, found[: given.rows])], left=1))
        if len(found) > given.rows:
            print(f"... {given.rows} of {len(found)}; --rows shows more")
        print_folded("", in_training(found, config.experts))


def layer_of(layout: Layout, given: int | None) -> int:
    """A layer whose experts are split over ranks. Raises :class:`ConfigError`."""
    layers = list(layout.model.experts())
    if not layers:
        raise ConfigError("no layer has experts: expected model.moe.experts=2 or more")
    if layout.ep_ranks == 1:
        block = layout.dp_cp * layout.tp
        raise ConfigError(
            f"parallel.ep=1 splits no experts: {divisors_hint('ep', block, 2)}"
            if block > 1
            else "parallel.ep=1 splits no experts: expected more, over parallel.dp x cp x tp"
        )
    if given is None:
        return layers[0]
    if given not in layers:
        raise ConfigError(f"--layer {given} has no experts: expected one of {ranges(layers)}")
    return given


def in_training(found: Sequence[DispatchCost], own: ExpertsConfig) -> str:
    """The fastest of what a run does, and the place of the configured one among these."""
    ways = [(cost.dispatch, cost.chunks) for cost in found if cost.trained]
    dispatch, chunks = ways[0]
    configured = own.dispatch, own.chunks
    place = "not among them"
    if configured in ways:
        place = f"number {1 + ways.index(configured)} of {len(ways)}"
    return (
        f"fastest in training: experts.dispatch={dispatch} experts.chunks={chunks}; "
        f"this configuration: {place}"
    )


def plain(cost: DispatchCost) -> dict[str, Any]:
    """A way with its costs, in bytes and seconds."""
    told = cost._asdict()
    for name in ("seconds", "exposed"):
        told |= {f"{name}_{what}": value for what, value in told.pop(name).items()}
    return told


def _row(cost: DispatchCost) -> list[str]:
    return [
        cost.dispatch,
        str(cost.chunks),
        cost.order or "-",
        size_text(cost.within),
        size_text(cost.between),
        milliseconds(cost.seconds["F"]),
        milliseconds(cost.seconds["I"]),
        f"{sum(cost.exposed.values()) / cost.both:.0%}",
        milliseconds(cost.wait) if cost.wait else "-",
    ]
