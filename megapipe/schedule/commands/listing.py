"""``list``: the registered schedules."""

import argparse
import inspect
import json
import re
from typing import Any

from megapipe.command_line import Commands, Parser
from megapipe.schedule.commands.scenario import json_number, placement_names
from megapipe.schedule.generators import accepts, aliases, build, names
from megapipe.schedule.generators.registry import HINTS, OPTIONS, generator_of
from megapipe.schedule.ir import Kind, Schedule
from megapipe.schedule.memory import weight_replicas
from megapipe.words import print_folded

SAMPLE = {"ranks": 4, "microbatches": 16}
"""Sizes at which every schedule can be built."""


def add(commands: "Commands[Parser]") -> None:
    parser = commands.add_parser("list", help="the registered schedules")
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> None:
    entries = [entry(name) for name in names()]
    if given.json:
        print(json.dumps(entries))
        return
    for told in entries:
        also = f" ({', '.join(told['aliases'])})" if told["aliases"] else ""
        words = [f"{told['placement']} placement", f"{told['backward']} backward"]
        words += [f"weights {told['weights']:g} x"] if told["weights"] > 1 else []
        words += [f"--{option.replace('_', '-')}" for option in told["options"]]
        words += [f"goes by {' and '.join(told['hints'])}"] if told["hints"] else []
        words += [f"arXiv {paper}" for paper in told["papers"]]
        print_folded(f"{told['schedule']}{also}", f"    {told['about']}", f"    {', '.join(words)}")


def entry(name: str) -> dict[str, Any]:
    """The object that `list --json` prints for a schedule."""
    generator, taken = generator_of(name), accepts(name)
    schedule = build(name, **SAMPLE)
    said = inspect.getdoc(generator) or ""
    module = inspect.getdoc(inspect.getmodule(generator)) or ""
    paper = re.compile(r"\b\d{4}\.\d{5}\b")
    return {
        "schedule": name,
        "aliases": sorted(alias for alias, whose in aliases().items() if whose == name),
        "about": " ".join(said.partition("\n\n")[0].split()),
        "placement": placement_names(schedule.placement)[0],
        "backward": _backward(schedule),
        "weights": json_number(max(weight_replicas(schedule))),
        "options": [option for option in OPTIONS if option in taken],
        "hints": [hint for hint in HINTS if hint in taken],
        "papers": list(dict.fromkeys(paper.findall(said) or paper.findall(module))),
    }


def _backward(schedule: Schedule) -> str:
    kinds = {op.kind for rank in range(len(schedule.ops)) for op in schedule.rank_ops(rank)}
    if {Kind.B, Kind.I} <= kinds:
        return "partly split"
    return "split" if Kind.I in kinds else "fused"
