"""Finds the fastest layouts of a model on a number of devices. It varies the sizes of the mesh,
the micro-batch, the schedule, its chunks, recomputation and the ZeRO stage. It prints the fastest
layouts that fit, with the time and memory of their plans (--dry-run). docs/planning.md explains.

example: megapipe plan llama_70b --gpus 128 --device H100
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megapipe import text
from megapipe.cli import configured, dump, possible_words
from megapipe.command_line import Parser, run_command, suggest
from megapipe.errors import ConfigError
from megapipe.plan.algorithms.command import print_choices
from megapipe.plan.memory_fit import size_text
from megapipe.plan.search.estimate import Estimate
from megapipe.plan.search.explain import explain
from megapipe.plan.search.front_picture import front_picture
from megapipe.plan.search.layouts import words_of
from megapipe.plan.search.search import FoundLayouts, Progress, Search, split_words
from megapipe.schedule.render.vector import to_svg

SHOW_EVERY_S = 0.5
"""Seconds between two updates of the line that shows the progress."""


def parser() -> Parser:
    """Return the command's parser."""
    made = Parser(prog="megapipe plan", description=__doc__)
    keys = made.add_argument(
        "keys",
        nargs="+",
        metavar="CONFIG or section.key=value",
        help="as for megapipe train; a value of a key that the search varies is kept",
    )
    suggest(keys, possible_words)
    made.add_argument("--gpus", type=int, required=True, metavar="N", help="number of devices")
    made.add_argument("--device", help="device, as in H100; default: plan.device")
    made.add_argument("--gpus-per-node", type=int, metavar="N", help="parallel.ranks_per_node")
    made.add_argument("--inter-node-gb-s", type=float, metavar="X", help="plan.inter_node_gb_s")
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
    made.add_argument("-o", "--output", type=Path, help="write the fastest as a configuration")
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
    if min(given.gpus, given.top, 1 if given.explain is None else given.explain) < 1:
        raise ConfigError("--gpus, --top and --explain: expected numbers of at least 1")
    for path in (given.output, given.svg):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}")
    published = given.algorithm is not None or given.compare_algorithms
    if published and (given.front or given.svg is not None or given.explain is not None):
        raise ConfigError(
            "--algorithm and --compare-algorithms print one table: expected no --front, --svg or "
            "--explain beside them"
        )
    if given.algorithm is not None and given.compare_algorithms:
        raise ConfigError("--algorithm and --compare-algorithms: expected only one of them")
    if given.explain is not None and given.json:
        raise ConfigError("--explain prints text: expected no --json beside it")
    words, fixed = split_words(given.keys)
    options = {
        "plan.gpus": given.gpus,
        "plan.device": given.device,
        "parallel.ranks_per_node": given.gpus_per_node,
        "plan.inter_node_gb_s": given.inter_node_gb_s,
    }
    words += words_of({key: value for key, value in options.items() if value is not None})
    search = Search(words, fixed, given.gpus)
    if published:
        chosen = print_choices(search, given.algorithm, as_json=given.json)
        if given.output is not None and chosen is not None:
            _write(given.output, dump(configured(chosen)))
        return
    shown = _Shown()
    found = search.run(given.top, shown, with_front=given.front or given.svg is not None)
    shown.clear()
    if not found.best and not found.complete:
        raise KeyboardInterrupt
    if not found.best:
        raise ConfigError(_nothing_fits(search, found))
    listed = found.front if given.front else found.best
    if given.json:
        if not found.complete:
            print("interrupted: the list is not complete", file=sys.stderr)
        print(json.dumps([_record(each) for each in listed]))
    else:
        print(table(listed))
        text.print_folded("", _summary(found))
    if given.svg is not None:
        devices = f"{search.gpus} {search.speeds.name or 'devices'}"
        title = f"layouts of {search.config.run.name} on {devices}"
        drawn = front_picture(title, found.planned, found.front, search.speeds.plannable_bytes)
        _write(given.svg, to_svg(drawn))
    if given.output is not None:
        fastest = [*search.words, *words_of(found.best[0].choice.keys)]
        _write(given.output, dump(configured(fastest)))
    if given.explain is not None:
        print(f"\n{_explanation(search, listed, given.explain)}")


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def table(found: Sequence[Estimate]) -> str:
    """Format layouts as a table with headings, the fastest first."""
    headings = (
        *("rank", "step s", "tokens/s/GPU", "MFU", "memory", "bubble"),
        *("dp", "tp", "pp", "cp", "ep", "batch", "schedule", "recompute", "ZeRO"),
    )
    rows: list[tuple[str, ...]] = [headings]
    for number, each in enumerate(found, start=1):
        choice, shape = each.choice, each.choice.shape
        gpus = choice.dp * choice.pp * shape.tp * shape.cp
        chunks = f" x {choice.chunks}" if choice.chunks > 1 else ""
        rows.append(
            (
                *(str(number), f"{each.seconds:.4g}", f"{each.tokens_per_second / gpus:,.0f}"),
                *(f"{each.mfu:.1%}", size_text(each.bytes), f"{each.bubble:.1%}"),
                *map(str, (choice.dp, shape.tp, choice.pp, shape.cp, shape.ep)),
                *(str(shape.microbatch), f"{choice.schedule}{chunks}", shape.policy),
                str(choice.zero),
            )
        )
    return text.table([list(row) for row in rows], left=0)


def _explanation(search: Search, listed: Sequence[Estimate], number: int) -> str:
    """Explain a layout of the table.

    Raises:
        ConfigError: the table has no layout of this number.
    """
    if not 1 <= number <= len(listed):
        raise ConfigError(f"--explain {number}: expected 1 to {len(listed)}")
    own = listed[number - 1]
    units, too_large = search.planner.units(own.choice), search.too_large(own.seconds)
    return explain(number, listed, units, search.speeds, too_large)


def _record(found: Estimate) -> dict[str, Any]:
    """Return a layout as a JSON record, in seconds and bytes."""
    return {
        "keys": dict(found.choice.keys),
        **{name: value for name, value in found._asdict().items() if name != "choice"},
    }


def _summary(found: FoundLayouts) -> str:
    """Describe how many layouts were looked at."""
    ended = "" if found.complete else "interrupted; so far: "
    return (
        f"{ended}{found.considered:,} layouts, {found.left_out:,} need too much memory or are "
        f"refused, {len(found.planned):,} planned in full"
    )


def _nothing_fits(search: Search, found: FoundLayouts) -> str:
    """Say why there is no layout: the least memory found, and what would help."""
    if found.least is None and found.refusal is not None:
        return f"none of {found.considered:,} layouts can be run; for example: {found.refusal}"
    if found.least is None:
        return f"none of {found.considered:,} layouts fits: even their lower bounds do not"
    size, choice = found.least
    limit = search.speeds.plannable_bytes
    room = "" if limit is None else f", but a plan may use {size_text(limit)}"
    keys = " ".join(words_of(choice.keys))
    return (
        f"none of {found.considered:,} layouts fits: the least memory is {size_text(size)}{room}, "
        f"with {keys}; more devices (--gpus) would help"
    )


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
