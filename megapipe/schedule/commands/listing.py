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
from megapipe.text import print_folded

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
    for listed in entries:
        also = f" ({', '.join(listed['aliases'])})" if listed["aliases"] else ""
        words = [f"{listed['placement']} placement", f"{listed['backward']} backward"]
        words += [f"weights {listed['weights']:g} x"] if listed["weights"] > 1 else []
        words += [f"--{option.replace('_', '-')}" for option in listed["options"]]
        words += [f"depends on {' and '.join(listed['hints'])}"] if listed["hints"] else []
        words += [f"arXiv {paper}" for paper in listed["papers"]]
        print_folded(
            f"{listed['schedule']}{also}", f"    {listed['about']}", f"    {', '.join(words)}"
        )


def entry(name: str) -> dict[str, Any]:
    """Return the object that `list --json` prints for a schedule."""
    generator, taken = generator_of(name), accepts(name)
    schedule = build(name, **SAMPLE)
    doc = inspect.getdoc(generator) or ""
    module = inspect.getdoc(inspect.getmodule(generator)) or ""
    paper = re.compile(r"\b\d{4}\.\d{5}\b")
    return {
        "schedule": name,
        "aliases": sorted(alias for alias, whose in aliases().items() if whose == name),
        "about": " ".join(doc.partition("\n\n")[0].split()),
        "placement": placement_names(schedule.placement)[0],
        "backward": _backward(schedule),
        "weights": json_number(max(weight_replicas(schedule))),
        "options": [option for option in OPTIONS if option in taken],
        "hints": [hint for hint in HINTS if hint in taken],
        "papers": list(dict.fromkeys(paper.findall(doc) or paper.findall(module))),
    }


def _backward(schedule: Schedule) -> str:
    kinds = {op.kind for rank in range(len(schedule.ops)) for op in schedule.rank_ops(rank)}
    if {Kind.B, Kind.I} <= kinds:
        return "partly split"
    return "split" if Kind.I in kinds else "fused"
