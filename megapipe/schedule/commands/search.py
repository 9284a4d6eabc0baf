"""``search``: find a schedule for uneven stages, latency and a memory limit."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megapipe.command_line import Commands, Parser
from megapipe.errors import ConfigError
from megapipe.schedule.commands.arguments import add_costs, add_placement, add_size, count, write
from megapipe.schedule.commands.measure import lines, measure
from megapipe.schedule.commands.scenario import Scenario, json_number
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement, loop, m_shape, vee, wave
from megapipe.schedule.search import search
from megapipe.schedule.search.tessel import search_repetend
from megapipe.schedule.text import to_csv
from megapipe.text import print_folded

SECONDS = 60
"""Default time limit of a search for a repetend on one placement."""
Found = tuple[Schedule, dict[str, Any], str]
"""A schedule, what --json prints of its search, and that as text."""


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser(
        "search",
        help="find a schedule for a setting",
        description="Find a schedule for uneven stages, latency and a memory limit, at least as "
        "good as every one of `list` that fits. Write it to a file to draw, change or train it. "
        "With --repetend and for --placement m, where the first and the last stage are on all "
        "ranks, it is compared with no other.",
    )
    add_size(parser)
    parser.add_argument(
        "--chunks", type=count, metavar="V", help="virtual stages per rank (loop: 2, wave: 4)"
    )
    add_placement(parser)
    add_costs(parser)
    parser.add_argument(
        "--evaluations", type=count, metavar="N", help="number of orders to try; more take longer"
    )
    parser.add_argument(
        "--repetend",
        action="store_true",
        help="find the shortest repeated pattern of a steady state and complete it (Tessel, "
        "2311.15269), however many the micro-batches are; needs OR-Tools (pip install "
        "'megapipe[exact]'); the only search for --placement m, whose schedules cannot be trained",
    )
    parser.add_argument(
        "--seconds",
        type=count,
        metavar="N",
        help=f"time limit of --repetend on each placement ({SECONDS})",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.csv", help="write what is found")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    setting = Scenario.of(given)
    find = _method(given, setting)
    start = time.perf_counter()
    schedule, found, words = find(given, setting)
    result = measure(setting, schedule, time.perf_counter() - start)
    result |= {"objective": setting.objective, **found}
    if given.output is not None:
        write(given.output, lambda path: path.write_text(to_csv(schedule), encoding="utf-8"))
    if given.json:
        print(json.dumps(result))
        return
    print_folded(
        *lines(result),
        f"  found     {setting.objective} {result['value']:g}; {words}; none is below "
        f"{result['lower_bound']:g}",
    )


def _method(
    given: argparse.Namespace, setting: Scenario
) -> Callable[[argparse.Namespace, Scenario], Found]:
    """Return the search to use.

    Raises:
        ConfigError: an argument that this search cannot use.
    """
    if not (given.repetend or setting.placement == "m"):
        if given.seconds is not None:
            raise ConfigError("argument --seconds: it needs --repetend")
        return _by_order
    if given.evaluations is not None:
        raise ConfigError("argument --evaluations: not with --repetend; use --seconds")
    if setting.objective != "makespan":
        raise ConfigError(
            f"argument --objective: {setting.objective} cannot be searched with --repetend; use "
            "makespan"
        )
    return _by_repetend


def _by_order(given: argparse.Namespace, setting: Scenario) -> Found:
    found = search(
        setting.ranks,
        setting.microbatches,
        cost_of=setting.cost,
        policy=setting.policy,
        placements=placements(setting),
        activation_limit=setting.activation_limit,
        accounting=setting.accounting,
        freed=setting.freed,
        objective=setting.objective,
        evaluations=given.evaluations,
        seed=setting.seed,
    )
    reached = found.baseline_value
    result = {
        "value": json_number(found.value),
        "lower_bound": json_number(found.lower_bound),
        "baseline": found.baseline,
        "baseline_value": reached and json_number(reached),
        "evaluations": found.evaluations,
    }
    best = "no schedule of `list` fits"
    if found.baseline is not None:
        best = f"{found.baseline}, the best of `list`, {result['baseline_value']:g}"
    return found.schedule, result, best


def _by_repetend(given: argparse.Namespace, setting: Scenario) -> Found:
    each = [
        search_repetend(
            placement,
            setting.microbatches,
            setting.cost(placement),
            activation_limit=setting.activation_limit,
            accounting=setting.accounting,
            freed=setting.freed,
            seconds=given.seconds or SECONDS,
        )
        for placement in placements(setting)
    ]
    found = min(each, key=lambda one: one.value)
    result = {
        "value": json_number(found.value),
        "lower_bound": json_number(min(one.lower_bound for one in each)),
        "period": json_number(found.period),
        "in_flight": found.in_flight,
        "shortest_period": found.proved,
    }
    words = f"period {result['period']:g} with {found.in_flight} micro-batches in flight"
    return found.schedule, result, words


def placements(setting: Scenario) -> list[Placement]:
    """Return the placements to search: the one of --placement, or all except m.

    Raises:
        ConfigError: --placement cannot have the requested chunks, or the stages of --stage-cost do
            not fit the ranks and chunks.
    """
    ranks, chunks = setting.ranks, setting.options["chunks"]
    stages = {len(times) for times in setting.stage_costs.values()}
    if setting.placement == "m":
        if chunks is not None or stages - {ranks + 2}:
            wrong = "chunks" if chunks is not None else "stage-cost"
            raise ConfigError(
                f"argument --{wrong}: --placement m has {ranks + 2} stages on {ranks} ranks: one "
                "on each, and the first and the last on all"
            )
        return [m_shape(ranks)]
    for number in stages:
        if number % ranks or chunks not in (None, number // ranks):
            raise ConfigError(
                f"argument --stage-cost: {number} stages are not "
                f"{chunks or 'a whole number of'} chunks on each of {ranks} ranks"
            )
        chunks = number // ranks
    shapes = {
        "single": loop(ranks) if chunks in (None, 1) else None,
        "loop": loop(ranks, chunks or 2) if chunks != 1 else None,
        "v": vee(ranks) if chunks in (None, 2) else None,
        "wave": wave(ranks, (chunks or 4) // 2) if chunks is None or chunks % 2 == 0 else None,
    }
    chosen = [setting.placement] if setting.placement else list(shapes)
    found = list(dict.fromkeys(shape for name in chosen if (shape := shapes[name])))
    if not found:
        raise ConfigError(
            f"argument --placement: {setting.placement} cannot have {chunks} chunks; single has 1, "
            "v 2, wave an even number, loop 2 or more"
        )
    return found
