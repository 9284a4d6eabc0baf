"""Predicted against measured step times and memory: ``python benchmarks/planner.py``.

Each row of ``benchmarks/data`` becomes a configuration (:mod:`published.assumptions`), whose step
the planner prices and simulates, and whose memory it plans. Rows that the planner cannot price are
counted by their reason. No constant is fitted to the rows, with two exceptions. The time for which
BLOOM's kernels wait for the host is derived from two rows, which no figure contains. The figures of
held-out halves use one factor per device, fitted on the other half.

Assumptions come from what sources say about their programs and machines. Some were looked up after
the first residuals had been seen: dropout, BLOOM's network, its blocking launches, and what waits
for collectives and reductions in programs of 2021.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from common import Result, parser, report
from published.assumptions import (
    ASSUMPTIONS,
    assumed_device,
    compiles,
    configuration,
    is_bloom,
    keeps_short_gradients,
    why_not_priced,
    words,
)
from published.figures import (
    APART,
    SPLITS,
    LayoutSet,
    Level,
    Prediction,
    Splits,
    Verdicts,
    grouped,
    held_out,
    layout_sets,
    percentile,
)
from published.points import OWN, PUBLISHED, Point, read_points
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megapipe.cli import parse
from megapipe.errors import MegapipeError
from megapipe.layout.resolve import resolve
from megapipe.layout.speeds import MARGIN, Speeds
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory_fit import demand, process_memory
from megapipe.plan.step_time import expected_step, simulate_step
from megapipe.plan.units import Units

QUICK = ("511", "512", "513", "519", "520", "521", "650", "651", "own1")
"""Rows of ``--quick``: a set of six layouts, two rows of another model, a step of megapipe."""
BLOCKING = ("1", "3")
"""BLOOM's rows from which the time per kernel is derived: one layout, whose micro-batches have 1
and 4 samples, so that the first has four times as many kernels in a step."""
WIDTH = 140
"""Characters of a line of the tables if they go to a file."""
LARGE_SET = 8
"""Layouts of a set from which on its regret has a target."""
REGRET, RIGHT = 0.03, 0.9
"""Targets: largest regret, smallest share of pairs in the right order."""
FEWEST_PAIRS = 10
"""Pairs of a set below which their share says nothing about the set."""
CAUSES = {
    "GPT 181B, 72 x 14336, 64 heads": "tp 8, and few stages with many parameters each, take longer "
    "than planned; probably collectives, the network's real speed is not known",
    "Qwen3-235B": "ep 32: DeepEP sends a token once to a node, megapipe a row per choice; others "
    "not known",
}
"""Causes of sets that miss a target, as far as they are known, by a part of the set's name."""


@cache
def _blocking_rows() -> list[Point]:
    points = {point.id: point for point in read_points([PUBLISHED])}
    return [points[id] for id in BLOCKING]


@cache
def launch_us() -> float:
    """Return the microseconds for which a kernel waits if launches block.

    A step takes a + b t, where t is this time; a and b are predicted. With the returned t, the
    predicted times of the two rows differ by as many seconds as the measured ones. Their other
    seconds, in which the planner may be wrong, are nearly the same in both rows.
    """
    (a, b), (c, d) = map(_at_0_and_slope, _blocking_rows())
    many, few = (point.step_s or 0.0 for point in _blocking_rows())
    return (many - few - (a - c)) / (b - d)


def _at_0_and_slope(point: Point) -> tuple[float, float]:
    none, more = (predict(point, launch=each).step_s for each in (0.0, 100.0))
    return none, (more - none) / 100


def predict(point: Point, launch: float | None = None) -> Prediction:
    """Price a point. `launch`: microseconds that each kernel of BLOOM's rows waits; default: those
    derived from two rows. Raises :class:`MegapipeError` if megapipe refuses the configuration."""
    settings = words(configuration(point))
    units = _units(settings)
    if units.layout.world != point.gpus:
        raise MegapipeError(f"the row's layout has {units.layout.world} GPUs, not {point.gpus}")
    speeds = Speeds.of(units.config)
    if is_bloom(point) and launch is None:
        launch = launch_us()
    speeds = replace(speeds, device=assumed_device(point, speeds.known, launch or 0.0))
    step = expected_step(units, speeds, simulate_step(units, speeds)).step
    for_memory = words(configuration(point, for_memory=True))
    tensors, total = _memory(point, units if for_memory == settings else _units(for_memory))
    capacity = None if speeds.memory_gb is None else 1e9 * speeds.memory_gb
    return Prediction(point, tuple(settings), step, tensors, total, capacity)


def _units(settings: Sequence[str]) -> Units:
    return Units(*resolve(parse(settings).config, None, None, measure=BY_UNITS))


def _memory(point: Point, units: Units) -> tuple[float, float]:
    """Return the bytes of tensors, and of everything, on the process that needs most."""
    tensors, totals = [], []
    short = keeps_short_gradients(point)
    each = zip(process_memory(units), demand(units).totals, strict=True)
    for (memory, activations), total in each:
        fewer = memory.gradients / 2 if short else 0.0
        tensors.append(memory.total + activations.device - fewer)
        totals.append(total - fewer)
    return max(tensors), max(totals)


def price(points: Sequence[Point]) -> tuple[list[Prediction], Counter[tuple[str, str]]]:
    """Price the points; count the others by source and reason."""
    priced: list[Prediction] = []
    others: Counter[tuple[str, str]] = Counter()
    console = Console(stderr=True)
    for point in track(points, "pricing", console=console, disable=not console.is_terminal):
        why = why_not_priced(point)
        if point in _blocking_rows():
            why = "the time of blocking launches is derived from it"
        if why is None:
            try:
                priced.append(predict(point))
            except MegapipeError as error:
                why = f"refused: {error}"
        if why is not None:
            others[point.origin, why] += 1
    return priced, others


def cause_of(own: LayoutSet) -> str:
    """Return why a set misses a target, if it is known."""
    return next((why for part, why in CAUSES.items() if part in own.name), "not known")


class Figures:
    """All figures of the priced points."""

    def __init__(self, priced: Sequence[Prediction]) -> None:
        self.priced = priced
        timed = [row for row in priced if row.point.step_s is not None]
        self.own = [row for row in timed if row.point.is_own]
        self.timed = [row for row in timed if not row.point.is_own]
        self.sets = layout_sets(self.timed)
        self.verdicts = Verdicts.of(priced)

    @cached_property
    def splits(self) -> Mapping[str, Splits]:
        """Errors of held-out halves, by what is not divided; {} if there is nothing to divide."""
        ways: Mapping[str, Callable[[Prediction], Hashable]] = {
            "a model of a source": lambda row: (row.point.source, row.point.model),
            "a source": lambda row: row.point.source,
        }
        return {
            what: held_out(self.timed, way)
            for what, way in ways.items()
            if len(grouped(self.timed, way)) > 1
        }

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs in the right order, and all, over all sets."""
        right, every = zip(*(own.pairs for own in self.sets), strict=True)
        return sum(right), sum(every)

    def levels(self, ratio: Callable[[Prediction], float | None]) -> dict[str, Level]:
        """Return level and spread of a ratio by source, over the rows that have it."""
        found = {}
        for origin, rows in grouped(self.priced, lambda row: row.point.origin).items():
            ratios = [each for each in map(ratio, rows) if each is not None]
            if ratios:
                found[str(origin)] = Level.of(ratios)
        return found


def claims(figures: Figures) -> Iterator[Result]:
    """Yield what has a target."""
    for what, errors in figures.splits.items():
        for name, values, target in (
            ("median", errors.middle, 8.0),
            ("90th percentile", errors.p90, 20.0),
        ):
            yield Result(
                f"error of the held-out half, {name}; not divided: {what}",
                100 * statistics.median(values),
                target,
                "%",
                f"measured, median of {SPLITS} splits",
            )
    for own in figures.sets:
        if len(own.choices) >= LARGE_SET:
            peer = f"the best of {len(own.choices)} layouts"
            yield Result(
                f"regret: {own.source}, {own.name}", 100 * own.regret, 100 * REGRET, "%", peer
            )
    if figures.sets:
        right, every = figures.pairs
        claim = f"pairs that differ by over {APART:.0%} in the right order"
        if every:
            yield Result(
                claim, 100 * right / every, 100 * RIGHT, "%", f"{every} pairs", at_least=True
            )
    judged = len(figures.verdicts.ran) + len(figures.verdicts.failed)
    if judged:
        wrong = len(figures.verdicts.wrong(MARGIN))
        claim = f"wrong verdicts on memory with a margin of {MARGIN:.0%}"
        yield Result(claim, wrong, 0, f"of {judged}", "ran, or ran out of memory")
    for row in figures.own:
        point = row.point
        claim = f"step of megapipe: {point.model}, {point.gpu}{', compiled' * compiles(point)}"
        peer = f"measured, {point.step_s:.4g} s"
        yield Result(claim, 100 * abs(row.ratio - 1), 5.0, "%", peer)


def tables(
    points: Sequence[Point], figures: Figures, others: Mapping[tuple[str, str], int]
) -> Iterator[Table]:
    """Yield what is printed before the claims."""
    table = _table("What is assumed where sources say nothing", "assumption", ">rows", "reason")
    for each in ASSUMPTIONS:
        if count := sum(each.applies(row.point) for row in figures.priced):
            table.add_row(each.what, str(count), each.why)
    yield table
    title = f"{len(figures.priced)} of {len(points)} rows are priced; the others by reason"
    table = _table(title, "source", "reason", ">rows")
    for (origin, why), count in sorted(others.items()):
        table.add_row(origin, why, str(count))
    yield table
    for title, ratio in (("time of a step", _time_ratio), ("memory", _memory_ratio)):
        table = _table(
            f"Predicted / measured {title}",
            *("source", ">rows", ">median", ">spread: median", ">90th percentile"),
        )
        for origin, level in figures.levels(ratio).items():
            spread = f"{level.middle:.1%}", f"{level.p90:.1%}"
            table.add_row(origin, str(level.n), f"{level.median:.3f}", *spread)
        yield table
    yield _sets_table(figures.sets)
    yield _misses_table(figures.sets)
    yield _splits_table(figures)
    yield _verdicts_table(figures.verdicts)
    yield _own_table(figures.own)


def _sets_table(sets: Sequence[LayoutSet]) -> Table:
    table = _table(
        "Layouts of one model, by time per sample",
        *(
            "source",
            "set",
            ">layouts",
            ">tau",
            ">regret",
            ">at one batch",
            ">right pairs",
            ">noise",
        ),
    )
    for own in sets:
        right, every = own.pairs
        table.add_row(
            own.source,
            own.name,
            str(len(own.choices)),
            f"{own.tau:.2f}",
            f"{own.regret:.1%}",
            _percent(own.regret_at_one_batch),
            f"{right} of {every}",
            _percent(own.noise),
        )
    return table


def _misses_table(sets: Iterable[LayoutSet]) -> Table:
    table = _table(
        f"Sets with a regret above {REGRET:.0%}, or with less than {RIGHT:.0%} of at least "
        f"{FEWEST_PAIRS} pairs in the right order",
        *("source", "set", "cause"),
    )
    for own in sets:
        right, every = own.pairs
        if own.regret > REGRET or right < RIGHT * every >= RIGHT * FEWEST_PAIRS:
            table.add_row(own.source, own.name, cause_of(own))
    return table


def _splits_table(figures: Figures) -> Table:
    table = _table(
        "Error of the held-out half, one factor per device from the other half: "
        f"median of {SPLITS} splits (5th to 95th percentile)",
        *("not divided", ">median error", ">90th percentile"),
    )
    for what, errors in figures.splits.items():
        cells = []
        for values in errors:
            low, high = percentile(values, 0.05), percentile(values, 0.95)
            cells.append(f"{statistics.median(values):.1%} ({low:.1%} to {high:.1%})")
        table.add_row(what, *cells)
    return table


def _verdicts_table(verdicts: Verdicts) -> Table:
    table = _table(
        "Planned share of the device's memory", "layouts", ">rows", ">lowest", ">highest"
    )
    for what, rows in (("ran", verdicts.ran), ("ran out of memory", verdicts.failed)):
        if rows:
            ends = (f"{share:.0%} (row {id})" for share, id in (min(rows), max(rows)))
            table.add_row(what, str(len(rows)), *ends)
    wrong = verdicts.wrong(MARGIN)
    table.add_row(f"judged wrongly: {', '.join(wrong) or 'none'}", str(len(wrong)), "", "")
    return table


def _own_table(rows: Iterable[Prediction]) -> Table:
    table = _table(
        "megapipe's own steps, without a fit",
        *("model", "device", ">planned s", ">measured s", ">planned / measured"),
    )
    for row in rows:
        point = row.point
        name = f"{point.model}, micro-batch {point.microbatch}{', compiled' * compiles(point)}"
        seconds = f"{row.step_s:.4g}", f"{point.step_s:.4g}"
        table.add_row(name, point.gpu, *seconds, f"{row.ratio:.3f}")
    return table


def _table(title: str, *headings: str) -> Table:
    """Return an empty table; a heading that begins with > is of a column of numbers."""
    table = Table(title=title, title_justify="left")
    for heading in headings:
        right = heading.startswith(">")
        table.add_column(heading.lstrip(">"), justify="right" if right else "left")
    return table


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _time_ratio(row: Prediction) -> float | None:
    return None if row.point.step_s is None else row.ratio


def _memory_ratio(row: Prediction) -> float | None:
    return None if row.point.memory is None else row.memory_ratio


def as_json(figures: Figures) -> dict[str, Any]:
    """Return every priced row, and the figures of each source and set."""
    levels = {"step": figures.levels(_time_ratio), "memory": figures.levels(_memory_ratio)}
    return {
        "rows": [
            {
                "id": row.point.id,
                "source": row.point.source,
                "model": row.point.model,
                "settings": list(row.settings),
                "planned_s": row.step_s,
                "measured_s": row.point.step_s,
                "planned_bytes": {"tensors": row.tensors, "all": row.total},
                "measured_bytes": row.point.memory,
                "device_bytes": row.capacity,
                "ran": row.point.ran,
            }
            for row in figures.priced
        ],
        "sources": {
            what: {origin: level._asdict() for origin, level in found.items()}
            for what, found in levels.items()
        },
        "sets": [
            {
                "source": own.source,
                "set": own.name,
                "layouts": len(own.choices),
                "tau": own.tau,
                "regret": own.regret,
                "regret_at_one_batch": own.regret_at_one_batch,
                "chosen": own.chosen.id,
                "best": own.best.id,
                "pairs_right": own.pairs[0],
                "pairs": own.pairs[1],
                "repeats_differ_by": own.noise,
            }
            for own in figures.sets
        ],
        "splits": {what: errors._asdict() for what, errors in figures.splits.items()},
    }


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument(
        "--points",
        type=Path,
        nargs="+",
        metavar="FILE",
        default=[PUBLISHED, OWN],
        help="files in the form of benchmarks/data/measured_points.csv (default: those there)",
    )
    options.add_argument("--only", default="", metavar="TEXT", help="sources or models with TEXT")
    options.add_argument(
        "--details", type=Path, metavar="FILE", help="write all rows and figures there, as JSON"
    )
    given = options.parse_args(argv)
    points = [
        point
        for point in read_points(given.points)
        if given.only in f"{point.source} {point.model}" and (not given.quick or point.id in QUICK)
    ]
    priced, others = price(points)
    figures = Figures(priced)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for table in tables(points, figures, others):
        if table.row_count:
            console.print(table)
    if any(is_bloom(row.point) for row in priced):
        rows = " and ".join(BLOCKING)
        print(f"A kernel of BLOOM's rows waits {launch_us():.0f} us, derived from rows {rows}.")
    report("Planner", list(claims(figures)), given.json)
    if given.details is not None:
        text = json.dumps(as_json(figures), indent=1)
        given.details.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
