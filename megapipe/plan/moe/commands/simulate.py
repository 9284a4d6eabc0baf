"""Lists every experts.dispatch (all_to_all, hierarchical, all_gather, fetch) for an MoE layer, in 1
to 8 chunks and in each order, the fastest first. It shows the bytes that a rank sends per layer and
micro-batch, forward and backward, within its node and to other nodes, and the simulated time of
both passes. Speeds are those of plan.intra_node_gb_s, plan.inter_node_gb_s,
parallel.ranks_per_node, plan.device and plan.time_factor; for a CPU, set plan.peak_tflops. The
column "wait" is the longest time that an exchange waits for a bucket of gradients
(optimizer.bucket_mib) on the same link.

example: experts.py simulate configs/mixtral_8x7b.yaml parallel.ranks_per_node=4 --latency-us 20
"""

import argparse
from collections.abc import Sequence
from typing import Any

from megapipe.cli import configured
from megapipe.command_line import Parser
from megapipe.config.experts import ExpertsConfig
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.p2p import link_latency
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import known_speeds
from megapipe.plan.commands.arguments import add_keys
from megapipe.plan.listing import add_forms, print_list
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import milliseconds, size_text
from megapipe.plan.moe.dispatch_options import DispatchCost, costs
from megapipe.plan.moe.moe_layer_time import AssumedCosts
from megapipe.plan.units import Units
from megapipe.schedule.commands.arguments import count, none_or_more, number
from megapipe.text import divisors_hint, print_folded, ranges, table

PURPOSE = "list all dispatch modes with their costs"
HEADINGS = (
    *("dispatch", "chunks", "order", "in node", "to others"),
    *("F ms", "I ms", "exposed", "wait ms"),
)


def add(parser: Parser) -> None:
    add_keys(parser, "parallel.ep or parallel.etp")
    parser.add_argument("--layer", type=none_or_more, metavar="N", help="one MoE layer (the first)")
    parser.add_argument(
        "--latency-us",
        type=number,
        metavar="N",
        help="microseconds of an empty exchange (plan.link_latency_us)",
    )
    parser.add_argument(
        "--permute-gb-s",
        type=number,
        default=0,
        metavar="N",
        help="GB/s with which a device permutes rows (0: no time)",
    )
    parser.add_argument(
        "--rows", type=count, default=24, metavar="N", help="rows of the table (%(default)s)"
    )
    add_forms(parser, "print the whole table as CSV, in bytes and seconds")


def run(given: argparse.Namespace) -> None:
    config, layout = resolve(configured(given.keys), None, None, measure=BY_UNITS)
    layer = layer_of(layout, given.layer)
    given_us = given.latency_us
    latency = link_latency(config) if given_us is None else float(given_us) / 1e6
    assumed = AssumedCosts(latency, float(given.permute_gb_s))
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
    """Return the MoE layer to simulate. Raises :class:`ConfigError` without expert parallelism."""
    layers = list(layout.model.experts())
    if not layers:
        raise ConfigError("no MoE layer: expected model.moe.num_experts of 2 or more")
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
    """Name the fastest option that training can use, and how the configured one compares."""
    options = [(cost.dispatch, cost.chunks) for cost in found if cost.trained]
    dispatch, chunks = options[0]
    configured = own.dispatch, own.overlap_chunks
    position = "not among them"
    if configured in options:
        position = f"number {1 + options.index(configured)} of {len(options)}"
    return (
        f"fastest in training: experts.dispatch={dispatch} experts.overlap_chunks={chunks}; this "
        f"configuration: {position}"
    )


def plain(cost: DispatchCost) -> dict[str, Any]:
    """Return a dispatch option as a JSON or CSV record, in bytes and seconds."""
    record = cost._asdict()
    for name in ("seconds", "exposed"):
        record |= {f"{name}_{what}": value for what, value in record.pop(name).items()}
    return record


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
