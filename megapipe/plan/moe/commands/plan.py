"""Judges by the log of a run which ranks should have which experts, and finds the pool of maps from
which policy migrate takes the best. For each layer and policy: the largest load of a rank by the
mean, with experts as a run begins and with the maps of the policy; the copies of all ranks
together; how many experts have moved; and per step what the busiest rank sends or receives for it
and how long that takes. Each recorded step is computed with the map for which the recorded step
before it is the reason. The configuration is the run's (config.yaml in its folder), with keys that
are given. Training has all policies (experts.policy). shadow and migrate go by the speed of the
device, which of a CPU is not known: log.peak_tflops says it. --policy balance needs none.

example: experts.py plan runs/quickstart_moe log.peak_tflops=0.1 --slots 1 -o pool.json
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from megapipe.cli import parse, possible_words
from megapipe.command_line import Parser, suggest
from megapipe.errors import ConfigError
from megapipe.experts.map import ExpertMap
from megapipe.experts.pool import find_pool
from megapipe.experts.pool_file import Pools, read_pools, write_pools
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import Speeds
from megapipe.plan.demand import milliseconds, size_text
from megapipe.plan.listing import add_forms, print_list
from megapipe.plan.measurements import BY_UNITS
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
from megapipe.words import count_noun, print_folded, table

PURPOSE = "which ranks should have which experts, by those that a run has chosen"
HEADINGS = ("layer", "policy", "before", "after", "copies", "moved", "a step", "ms")


def add(parser: Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER", help="of the run")
    keys = parser.add_argument(
        "keys",
        nargs="*",
        metavar="section.key=value",
        help="as train.py takes them, in the place of the run's; parallel.ep above 1 is needed",
    )
    suggest(keys, possible_words)
    parser.add_argument(
        "--layer", type=none_or_more, metavar="N", help="one with experts (all of them)"
    )
    parser.add_argument(
        "--slots", type=count, default=2, metavar="N", help="copies that a rank has room for (2)"
    )
    parser.add_argument("--policy", choices=POLICIES, help="judge this one alone (all)")
    pool = parser.add_mutually_exclusive_group()
    pool.add_argument(
        "--maps", type=count, default=4, metavar="N", help="of the pool of each layer, at most (4)"
    )
    pool.add_argument(
        "--pool", type=Path, metavar="FILE.json", help="take this pool, made from another log"
    )
    parser.add_argument("-o", "--output", metavar="FILE.json", type=Path, help="write the pool")
    add_forms(parser, "print the table as CSV, in bytes and seconds")


def run(given: argparse.Namespace) -> None:
    config = parse([str(given.folder / "config.yaml"), *given.keys]).config
    config, layout = resolve(config, None, None, measure=BY_UNITS)
    first = layer_of(layout, given.layer)
    if given.policy not in (None, "migrate") and (given.output or given.pool):
        raise ConfigError(f"--policy {given.policy} has no pool: expected it without -o and --pool")
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
        begin = ExpertMap.even(layout.model.experts()[layer], layout.ep, given.slots)
        pool = pools.get(layer, ())
        found += score_placements(layer, traces[layer], begin, pool, costs[layer], policies)
    if not print_list(given, [each._asdict() for each in found]):
        number = len(traces[layers[0]])
        print_folded(
            f"{number} recorded steps, experts over {layout.ep} ranks of {given.slots} slots"
        )
        print(table([HEADINGS, *map(_row, found)], left=2))


def traces_of(
    path: Path, choices: Choices, layout: Layout, layers: Sequence[int]
) -> dict[int, dict[int, Sequence[int]]]:
    """By layer and step the choices of each expert. Raises :class:`ConfigError` for those of
    another model, or of one step."""
    found = {}
    for layer in layers:
        own = {step: counts[layer] for step, counts in choices.items() if layer in counts}
        experts = layout.model.experts()[layer]
        other = next((counts for counts in own.values() if len(counts) != experts), None)
        if other is not None:
            raise ConfigError(
                f"{path}: layer {layer} has {count_noun(len(other), 'expert')}: expected "
                f"{experts}, those of model.moe.experts"
            )
        if len(own) < 2:
            raise ConfigError(
                f"{path}: {count_noun(len(own), 'step')} with the choices of layer {layer}: "
                "expected 2 or more, of which each is the reason for the next; see "
                "log.experts_every"
            )
        found[layer] = own
    return found


def pools_of(
    given: argparse.Namespace,
    layout: Layout,
    traces: Mapping[int, Mapping[int, Sequence[int]]],
    costs: Mapping[int, Costs],
) -> Pools:
    """By layer, from a file or from the log."""
    begin = {n: ExpertMap.even(layout.model.experts()[n], layout.ep) for n in traces}
    if given.pool is not None:
        return read_pools(given.pool, begin)
    return {
        layer: find_pool(
            begin[layer],
            [trace[step] for step in sorted(trace)],
            given.maps,
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
