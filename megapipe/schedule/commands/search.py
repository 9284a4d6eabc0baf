"""``search``: find a schedule for uneven stages, latency and a memory limit."""

import argparse
import json
import time
from pathlib import Path

from megapipe.command_line import Commands, Parser
from megapipe.errors import ConfigError
from megapipe.schedule.commands.arguments import add_costs, add_placement, add_size, count, write
from megapipe.schedule.commands.measure import lines, measure
from megapipe.schedule.commands.scenario import Scenario, json_number
from megapipe.schedule.placement import Placement, loop, vee, wave
from megapipe.schedule.search import search
from megapipe.schedule.text import to_csv
from megapipe.text import print_folded


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser(
        "search",
        help="find a schedule for a setting",
        description="Find a schedule for uneven stages, latency and a memory limit, at least as "
        "good as every one of `list` that fits. Write it to a file to draw, change or train it.",
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
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.csv", help="write what is found")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    setting = Scenario.of(given)
    start = time.perf_counter()
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
    result = measure(setting, found.schedule, time.perf_counter() - start)
    reached = found.baseline_value
    result |= {
        "objective": setting.objective,
        "value": json_number(found.value),
        "lower_bound": json_number(found.lower_bound),
        "baseline": found.baseline,
        "baseline_value": reached and json_number(reached),
        "evaluations": found.evaluations,
    }
    if given.output is not None:
        write(given.output, lambda path: path.write_text(to_csv(found.schedule), encoding="utf-8"))
    if given.json:
        print(json.dumps(result))
        return
    best = "no schedule of `list` fits"
    if found.baseline is not None:
        best = f"{found.baseline}, the best of `list`, {result['baseline_value']:g}"
    print_folded(
        *lines(result),
        f"  found     {setting.objective} {result['value']:g}; {best}; none is below "
        f"{result['lower_bound']:g}",
    )


def placements(setting: Scenario) -> list[Placement]:
    """Return the placements to search: the one of --placement, or all.

    Raises:
        ConfigError: --placement cannot have the requested chunks, or the stages of --stage-cost do
            not fit the ranks and chunks.
    """
    ranks, chunks = setting.ranks, setting.options["chunks"]
    stages = {len(times) for times in setting.stage_costs.values()}
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
