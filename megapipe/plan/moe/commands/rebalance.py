"""Scores expert placements with the log of a run, and finds the pool of maps from which policy
migrate chooses. For each layer and policy it shows the largest load of a rank relative to the mean,
with the initial map and with the policy's maps; the number of replicas on all ranks; and how many
experts have moved. It also shows the bytes that the busiest rank sends or receives per step, and
their time. In each recorded step the policy's map is chosen from the previous recorded step. The
configuration is config.yaml in the run folder, with the given keys. All policies are values of
experts.rebalance. Policies shadow and migrate need the device's speed; for an unknown device, such
as a CPU, set plan.peak_tflops. --policy balance does not need it.

example: experts.py rebalance runs/quickstart_moe plan.peak_tflops=1 --replica-slots 1 -o pool.json
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.cli import configured, possible_words
from megapipe.command_line import Parser, suggest
from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import find_pool
from megapipe.experts.pool_file import Pools, read_pools, write_pools
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.listing import add_forms, print_list
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import milliseconds, size_text
from megapipe.plan.moe.commands.recorded import LOG, Choices, recorded
from megapipe.plan.moe.commands.simulate import layer_of
from megapipe.plan.moe.placement import (
    POLICIES,
    Costs,
    PlacementScore,
    score_placements,
    steps_between,
)
from megapipe.plan.units import Units
from megapipe.schedule.commands.arguments import count, none_or_more, write
from megapipe.text import count_noun, print_folded, table

PURPOSE = "compute which ranks should hold which experts, from the log of a run"
HEADINGS = ("layer", "policy", "before", "after", "copies", "moved", "a step", "ms")


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="folder of the run")
    keys = parser.add_argument(
        "keys",
        nargs="*",
        metavar="section.key=value",
        help="settings that replace the run's, as for megapipe train; needs parallel.ep above 1",
    )
    suggest(keys, possible_words)
    parser.add_argument(
        "--layer", type=none_or_more, metavar="N", help="one MoE layer (all of them)"
    )
    parser.add_argument(
        "--replica-slots",
        type=count,
        default=2,
        metavar="N",
        help="slots for replicas on each rank (2)",
    )
    parser.add_argument("--policy", choices=POLICIES, help="evaluate only this policy (all)")
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--pool-size", type=count, default=4, metavar="N", help="maximum maps in a layer's pool (4)"
    )
    pool.add_argument(
        "--pool", type=Path, metavar="FILE.json", help="use this pool, made from another log"
    )
    parser.add_argument("-o", "--output", metavar="FILE.json", type=Path, help="write the pool")
    add_forms(parser, "print the table as CSV, in bytes and seconds")


def run(given: argparse.Namespace) -> None:
    config = configured([str(given.folder / "config.yaml"), *given.keys])
    config, layout = resolve(config, None, None, measure=BY_UNITS)
    first = layer_of(layout, given.layer)
    if given.policy not in (None, "migrate") and (given.output or given.pool):
        raise ConfigError(f"--policy {given.policy} has no pool: remove -o and --pool")
    if layout.ep == 1:
        raise ConfigError("parallel.ep=1 has all experts on each rank: expected 2 or more")
    layers = list(layout.model.experts()) if given.layer is None else [first]
    speeds, policies = Speeds.of(config), POLICIES if given.policy is None else (given.policy,)
    units = Units(config, layout)
    costs = {layer: Costs.of(units, speeds, layer) for layer in layers}
    traces = traces_of(given.folder / LOG, recorded(given.folder / LOG), layout, layers)
    pools = pools_of(given, layout, traces, costs) if "migrate" in policies else {}
    if given.output is not None:
        write(given.output, lambda path: write_pools(path, pools))
    found = []
    for layer in layers:
        begin = ExpertMap.even(layout.model.experts()[layer], layout.ep, given.replica_slots)
        pool = pools.get(layer, ())
        found += score_placements(layer, traces[layer], begin, pool, costs[layer], policies)
    if not print_list(given, [each._asdict() for each in found]):
        number = len(traces[layers[0]])
        print_folded(
            f"{number} recorded steps, experts over {layout.ep} ranks of {given.replica_slots} "
            "slots"
        )
        print(table([HEADINGS, *map(_row, found)], left=2))


def traces_of(
    path: Path, choices: Choices, layout: Layout, layers: Sequence[int]
) -> dict[int, dict[int, Sequence[int]]]:
    """Return the number of choices of each expert, by layer and step. Raises :class:`ConfigError`
    for a log of another model, or of only one step."""
    found = {}
    for layer in layers:
        own = {step: counts[layer] for step, counts in choices.items() if layer in counts}
        experts = layout.model.experts()[layer]
        other = next((counts for counts in own.values() if len(counts) != experts), None)
        if other is not None:
            raise ConfigError(
                f"{path}: layer {layer} has {count_noun(len(other), 'expert')}: expected "
                f"{experts}, those of model.moe.num_experts"
            )
        if len(own) < 2:
            raise ConfigError(
                f"{path}: {count_noun(len(own), 'step')} with the choices of layer {layer}: "
                "expected 2 or more, as each step decides the map of the next; see "
                "log.expert_counts_every"
            )
        found[layer] = own
    return found


def pools_of(
    given: argparse.Namespace,
    layout: Layout,
    traces: Mapping[int, Mapping[int, Sequence[int]]],
    costs: Mapping[int, Costs],
) -> Pools:
    """Return the expert pool of each layer (maps that migrate chooses from), read or searched."""
    begin = {n: ExpertMap.even(layout.model.experts()[n], layout.ep) for n in traces}
    if given.pool is not None:
        return read_pools(given.pool, begin)
    return {
        layer: find_pool(
            begin[layer],
            [trace[step] for step in sorted(trace)],
            given.pool_size,
            costs[layer].worth(steps_between(trace)),
        )
        for layer, trace in traces.items()
    }


def _row(each: PlacementScore) -> list[str]:
    return [
        str(each.layer),
        each.policy,
        f"{each.before:.3f}",
        f"{each.after:.3f}",
        f"{each.copies:.1f}",
        str(each.moved),
        size_text(round(each.bytes)),
        milliseconds(each.seconds),
    ]
