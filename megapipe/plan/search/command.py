"""Finds the fastest layouts of a model on a number of devices. It varies the sizes of the mesh,
the micro-batch, the schedule, its chunks, recomputation and the ZeRO stage. It prints the fastest
layouts that fit, with the time and memory of their plans (--dry-run). docs/planning.md explains.

With --calibrate it fits factors of planned times to runs instead.

example: megapipe plan llama_70b --gpus 128 --device H100
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path

from megapipe import text
from megapipe.cli import configured, dump, parse_and_notify, possible_words
from megapipe.command_line import Parser, run_command, suggest
from megapipe.config.config import Config
from megapipe.config.plan_file import plan_words
from megapipe.errors import ConfigError
from megapipe.plan.algorithms.command import print_choices
from megapipe.plan.calibrate_command import run_calibration
from megapipe.plan.search.estimate import Estimate
from megapipe.plan.search.explain import explain
from megapipe.plan.search.front_picture import front_picture
from megapipe.plan.search.layouts import with_keys, words_of
from megapipe.plan.search.listing import Budget, record, summary, table
from megapipe.plan.search.objectives import OBJECTIVES, Goal, Result
from megapipe.plan.search.refine import Refiner
from megapipe.plan.search.search import Progress, Search, split_words
from megapipe.schedule.render.vector import to_svg

SHOW_EVERY_S = 0.5
"""Seconds between two updates of the line that shows the progress."""


def parser() -> Parser:
    """Return the command's parser."""
    made = Parser(prog="megapipe plan", description=__doc__)
    keys = made.add_argument(
        "keys",
        nargs="*",
        metavar="CONFIG or section.key=value",
        help="as for megapipe train; a value of a key that the search varies is kept",
    )
    suggest(keys, possible_words)
    made.add_argument(
        "--gpus", type=_numbers, metavar="N[,N...]",
        help="number of devices; several: layouts of each of them are compared",
    )  # fmt: skip
    made.add_argument("--device", help="device, as in H100; default: plan.device")
    made.add_argument("--gpus-per-node", type=int, metavar="N", help="parallel.ranks_per_node")
    made.add_argument("--inter-node-gb-s", type=float, metavar="X", help="plan.inter_node_gb_s")
    made.add_argument(
        "--objective", choices=OBJECTIVES, default="time",
        help="; ".join(f"{name}: {meaning}" for name, meaning in OBJECTIVES.items())
        + " (default: time)",
    )  # fmt: skip
    made.add_argument(
        "--tokens", type=_count, metavar="N",
        help="tokens of the run, as in 15T or 300B, for its days; default: those of the "
        "configuration",
    )  # fmt: skip
    made.add_argument(
        "--price", type=float, metavar="X", help="price of a device for an hour, for the run's cost"
    )
    made.add_argument(
        "--algorithm", metavar="NAME", help="plan as a published planner does: pipedream, alpa, ..."
    )
    made.add_argument(
        "--compare-algorithms",
        action="store_true",
        help="print what each published planner chooses",
    )
    made.add_argument("--top", type=int, default=10, metavar="N", help="layouts to print")
    made.add_argument(
        "--front",
        action="store_true",
        help="print, of all layouts, those that no other beats in time and in memory",
    )
    made.add_argument(
        "--explain",
        type=int,
        nargs="?",
        const=1,
        metavar="RANK",
        help="say where the time and the memory of a printed layout go (default: of the fastest)",
    )
    made.add_argument(
        "--refine",
        action="store_true",
        help="let the stages of the printed layouts differ: less recomputation on ranks that have "
        "memory for it, and layers moved off the slowest rank",
    )
    made.add_argument(
        "--calibrate",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="plan no layouts: fit factors of planned times to the timelines (log.timeline) of the "
        "runs in these folders",
    )
    made.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="plan with the factors that --calibrate has written with -o",
    )
    made.add_argument(
        "--links",
        type=Path,
        metavar="FILE",
        help="plan with the links of a file that megapipe doctor --links has written",
    )
    made.add_argument(
        "-o",
        "--output",
        type=Path,
        help="write the fastest as a configuration; with --calibrate the factors",
    )
    made.add_argument(
        "--svg", type=Path, metavar="FILE", help="draw the layouts and the front of --front"
    )
    made.add_argument("--json", action="store_true", help="print a JSON list")
    made.set_defaults(run=run)
    return made


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code of the process."""
    return run_command(parser(), argv)


def run(given: argparse.Namespace) -> None:
    given.keys += [
        word for path in (given.calibration, given.links) if path for word in plan_words(path)
    ]
    if given.calibrate is not None:
        device = [] if given.device is None else [f"plan.device={given.device}"]
        run_calibration(given.calibrate, [*given.keys, *device], given.output)
        return
    if given.gpus is None or not given.keys:
        raise ConfigError("expected CONFIG and --gpus N, or --calibrate RUN")
    _check(given)
    words, free = split_words(given.keys)
    options = {
        "plan.device": given.device,
        "parallel.ranks_per_node": given.gpus_per_node,
        "plan.inter_node_gb_s": given.inter_node_gb_s,
    }
    words += words_of({key: value for key, value in options.items() if value is not None})
    command = parse_and_notify(words)
    config = command.config
    if config.plan.links:
        config = with_keys(config, {"pipeline.rank_order": "auto"})
    if given.algorithm is not None or given.compare_algorithms:
        (gpus,) = given.gpus
        words.append(f"plan.gpus={gpus}")
        search = Search(with_keys(config, {"plan.gpus": gpus}), free | command.searched, gpus)
        chosen = print_choices(search, words, given.algorithm, as_json=given.json)
        if given.output is not None and chosen is not None:
            _write(given.output, dump(configured(chosen)))
        return
    shown = _Shown()
    goal = Goal(given.objective, given.gpus, given.top, given.front or given.svg is not None)

    def searcher(config: Config, gpus: int) -> Search:
        planned = with_keys(config, {"plan.gpus": gpus})
        return Search(planned, free | command.searched, gpus)

    results = goal.results(config, searcher, shown)
    listed = goal.listed(results)
    if given.refine:
        listed = goal.ordered(_refined(listed, shown))
    shown.clear()
    if not listed:
        raise KeyboardInterrupt
    budget = Budget(given.tokens, given.price)
    if given.json:
        if not all(each.found.complete for each in results):
            print("interrupted: the list is not complete", file=sys.stderr)
        print(json.dumps([record(each, found, budget) for each, found in listed]))
    else:
        print(table(listed, goal, budget))
        for each in results:
            text.print_folded("", summary(each, several=len(results) > 1))
    if given.svg is not None:
        _draw(given.svg, results[0])
    if given.output is not None:
        best, found = listed[0]
        _write(given.output, dump(with_keys(best.search.config, found.choice.keys)))
    if given.explain is not None:
        print(f"\n{_explanation(listed, given.explain)}")


def _refined(
    listed: Sequence[tuple[Result, Estimate]], shown: _Shown
) -> list[tuple[Result, Estimate]]:
    """Refine found layouts. Ctrl-C leaves the rest as it is."""
    refined = list(listed)
    with contextlib.suppress(KeyboardInterrupt):
        for number, (result, found) in enumerate(listed):

            def notify(best: Estimate, done: int = number) -> None:
                shown(Progress(done, len(listed), "layouts refined", best))

            search = result.search
            refiner = Refiner(search.planner, search.speeds, notify)
            refined[number] = result, refiner.refine(found)
    return refined


def _check(given: argparse.Namespace) -> None:
    """Raise ConfigError for options that are wrong, or that do not go together."""
    if min(given.top, 1 if given.explain is None else given.explain) < 1:
        raise ConfigError("--top and --explain: expected numbers of at least 1")
    for path in (given.output, given.svg):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
    if given.explain is not None and given.json:
        raise ConfigError("--explain prints text: expected no --json beside it")
    if given.objective == "cost" and given.price is None:
        raise ConfigError("--objective cost: expected --price X, of a device for an hour")
    published = given.algorithm is not None or given.compare_algorithms
    if published and (given.front or given.svg is not None or given.explain is not None):
        raise ConfigError(
            "--algorithm and --compare-algorithms print one table: expected no --front, --svg or "
            "--explain beside them"
        )
    budget = given.price is not None or given.tokens is not None
    if published and (given.objective != "time" or given.refine or budget):
        raise ConfigError(
            "--algorithm and --compare-algorithms have objectives of their own: expected no "
            "--objective, --refine, --tokens or --price beside them"
        )
    if given.algorithm is not None and given.compare_algorithms:
        raise ConfigError("--algorithm and --compare-algorithms: expected only one of them")
    several = len(given.gpus) > 1
    if several and published:
        raise ConfigError("--algorithm and --compare-algorithms take one number: expected --gpus N")
    if several and (given.svg is not None or given.objective in ("gpus", "sequence")):
        other = "--svg" if given.svg is not None else f"--objective {given.objective}"
        raise ConfigError(f"{other} takes one number of devices: expected --gpus N")
    if given.price is not None and not 0 < given.price < inf:
        raise ConfigError(f"--price {given.price}: expected a number above 0")


def _numbers(words: str) -> list[int]:
    """Read numbers of devices: 64,128."""
    found = [int(word) if word.isdecimal() else 0 for word in words.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected N or N,N, at least 1, not {words!r}")
    return sorted(set(found))


def _count(word: str) -> float:
    """Read a number of tokens: 300B, 15T, 1e12."""
    scale = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(word[-1:].upper(), 1.0)
    with contextlib.suppress(ValueError):
        found = float(word[:-1] if scale > 1 else word) * scale
        if 0 < found < inf:
            return found
    raise argparse.ArgumentTypeError(f"expected a number of tokens, as in 300B, not {word!r}")


def _draw(path: Path, result: Result) -> None:
    """Draw the layouts of a search."""
    search, found = result
    devices = f"{search.gpus} {search.speeds.name or 'devices'}"
    title = f"layouts of {search.config.run.name} on {devices}"
    drawn = front_picture(title, found.planned, found.front, search.speeds.plannable_bytes)
    _write(path, to_svg(drawn))


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _explanation(listed: Sequence[tuple[Result, Estimate]], number: int) -> str:
    """Explain a layout of the table.

    Raises:
        ConfigError: the table has no layout of this number.
    """
    if not 1 <= number <= len(listed):
        raise ConfigError(f"--explain {number}: expected 1 to {len(listed)}")
    result, own = listed[number - 1]
    search = result.search
    units, too_large = search.planner.units(own.choice), search.too_large(own.seconds)
    return explain(number, [each for _, each in listed], units, search.speeds, too_large)


class _Shown:
    """A line on the terminal that shows the progress of a search."""

    def __init__(self) -> None:
        self._terminal, self._next = text.is_terminal(sys.stderr), 0.0

    def __call__(self, progress: Progress) -> None:
        if not self._terminal or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SHOW_EVERY_S
        best = "" if progress.best is None else f", best {progress.best.seconds:.4g} s"
        line = f"{progress.done:,} of {progress.total:,} {progress.what}{best}"
        print(f"\r{line:<70}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._terminal:
            print(f"\r{'':<70}\r", end="", file=sys.stderr, flush=True)
