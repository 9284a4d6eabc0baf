"""``megapipe plan --algorithm NAME`` and ``--compare-algorithms``."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from math import inf
from typing import Any

from megapipe import text
from megapipe.errors import ConfigError
from megapipe.plan.algorithms.compare import Choice, choose, keys_of, words
from megapipe.plan.algorithms.measured import measured_problem
from megapipe.plan.algorithms.problem import Problem
from megapipe.plan.algorithms.registry import algorithm, algorithms
from megapipe.plan.memory_fit import size_text
from megapipe.plan.search.layouts import words_of
from megapipe.plan.search.search import Search


def print_choices(
    search: Search, given: Sequence[str], name: str | None, *, as_json: bool
) -> list[str] | None:
    """Print what a published planner chooses, or if `name` is None, what each of them does. Return
    the configuration of the fastest plan that the trainer can run, as words of a command line;
    None if there is none. `given`: words of the configuration that is planned.

    Raises:
        ConfigError: an unknown planner, or a configuration that cannot be measured.
    """
    chosen = list(algorithms().values()) if name is None else [algorithm(name)]
    problem = measured_problem(search)
    found = []
    for number, each in enumerate(chosen):
        _show(f"{number} of {len(chosen)} planners done, {each.name}")
        found.append(choose(each, problem))
    _show("")
    found.sort(key=lambda each: (each.seconds, each.algorithm.name))
    runnable = [each for each in found if each.seconds < inf and each.obstacle is None]
    if as_json:
        print(json.dumps([record(problem, each, found[0].seconds) for each in found]))
        return _words_of(given, problem, runnable)
    if name is not None and found[0].plan is None:
        raise ConfigError(
            f"--algorithm {name}: it finds no plan that fits; more devices would help"
        )
    print(table(problem, found))
    text.print_folded("", _summary(problem, found))
    made = _words_of(given, problem, runnable)
    if made is not None:
        print(f"megapipe train {shlex.join(made)}")
    return made


def _words_of(
    given: Sequence[str], problem: Problem, runnable: Sequence[Choice]
) -> list[str] | None:
    """Return the configuration of the first plan as words of a command line."""
    if not runnable or runnable[0].plan is None:
        return None
    return [*given, *words_of(keys_of(problem, runnable[0].plan))]


def table(problem: Problem, found: Sequence[Choice]) -> str:
    """Format choices as a table with headings, the fastest first."""
    rows = [["algorithm", "step s", "gap", "memory", "trainer", "choice"]]
    least = found[0].seconds
    for each in found:
        if each.plan is None or each.judged is None:
            rows.append([each.algorithm.name, "", "", "", "", "no plan that fits"])
            continue
        gap = f"{each.judged.seconds / least - 1:.1%}" if each.seconds < inf else "too large"
        rows.append(
            [
                *(each.algorithm.name, f"{each.judged.seconds:.4g}", gap),
                *(size_text(max(each.judged.peaks)), "no" if each.obstacle else "yes"),
                words(problem, each.plan) + (f"; {each.obstacle}" if each.obstacle else ""),
            ]
        )
    width = max(len(row[-1]) for row in rows)
    return text.table([[*row[:-1], row[-1].ljust(width)] for row in rows], left=1)


def record(problem: Problem, choice: Choice, least: float) -> dict[str, Any]:
    """Return a choice as a JSON record, in seconds and bytes. `least`: seconds of the best one."""
    plan, judged, known = choice.plan, choice.judged, choice.algorithm
    made: dict[str, Any] = {
        "algorithm": known.name,
        "source": known.source,
        "objective": known.objective,
        "optimal_for_its_objective": known.optimal,
        "plan": None,
    }
    if plan is None or judged is None:
        return made
    runs = choice.obstacle is None
    return made | {
        "plan": [
            {
                "units": [problem.units[unit].name for unit in range(each.first, each.last)],
                "devices": list(each.devices),
                "tp": [choice.tp for choice in each.choices],
                "recompute": [choice.recompute for choice in each.choices],
            }
            for each in plan.stages
        ],
        "microbatches": plan.microbatches,
        "schedule": plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name,
        "seconds": judged.seconds,
        "gap": judged.seconds / least - 1 if choice.seconds < inf else None,
        "fits": judged.fits,
        "peak_bytes": list(judged.peaks),
        "trainer_runs_it": runs,
        "obstacle": choice.obstacle,
        "keys": keys_of(problem, plan) if runs else None,
    }


def _summary(problem: Problem, found: Sequence[Choice]) -> str:
    """Say what the table's columns mean."""
    degrees = ", ".join(map(str, problem.tensor_sizes))
    only = (
        "" if len(found) > 1 else f"{found[0].algorithm.source}: {found[0].algorithm.objective}. "
    )
    return (
        f"{only}A step is simulated without its update, the same way for each plan, on "
        f"{problem.devices} devices with tensor-parallel degrees {degrees}. The gap is to the "
        "fastest plan of the table that fits. trainer: whether megapipe can train so."
    )


def _show(line: str) -> None:
    """Show a line of progress on the terminal instead of the one before."""
    if text.is_terminal(sys.stderr):
        print(f"\r{line:<70}\r", end="", file=sys.stderr, flush=True)
