"""Figures of a schedule (makespan, bubble, memory, messages), as text and as JSON."""

import time
from fractions import Fraction
from typing import Any

from megapipe.schedule.async_schedules.staleness import staleness
from megapipe.schedule.async_schedules.times import window_times
from megapipe.schedule.commands.scenario import Scenario, json_number, placement_names
from megapipe.schedule.ir import Schedule
from megapipe.schedule.memory import (
    messages,
    peak_held,
    peak_weighted,
    volume,
    weight_replicas,
)
from megapipe.schedule.proof.validate import validate
from megapipe.schedule.render.bars import most_chunks
from megapipe.schedule.timing.idle import idle
from megapipe.schedule.timing.simulate import simulate


def describe(schedule: Schedule) -> dict[str, Any]:
    """Return the properties of a schedule that do not depend on costs.

    Raises:
        ScheduleError: the schedule cannot be executed.
    """
    report = validate(schedule)
    return {
        "schedule": schedule.name,
        "ranks": schedule.placement.ranks,
        "microbatches": json_number(schedule.whole_microbatches),
        "chunks": most_chunks(schedule.placement),
        "slices": schedule.slices,
        "placement": placement_names(schedule.placement)[0],
        "valid": True,
        "bitwise_order": report.bitwise_order,
        "ops": report.ops,
        "messages": messages(schedule),
        "volume": json_number(sum(volume(schedule).values(), start=Fraction(0))),
        "peak_held": [json_number(value) for value in peak_held(schedule)],
        "weight_copies": [json_number(value) for value in weight_replicas(schedule)],
    }


def measure(setting: Scenario, schedule: Schedule, generate_seconds: float) -> dict[str, Any]:
    """Prove that a schedule can be executed, and time it; return the object that --json prints.

    Raises:
        ScheduleError: the schedule cannot be executed, or the costs do not fit it.
    """
    described = describe(schedule)
    start = time.perf_counter()
    timeline = setting.time(schedule)
    seconds = time.perf_counter() - start
    alone = timeline
    if timeline.gather_ticks or timeline.reduction_ticks:
        alone = simulate(schedule, timeline.cost.without_replicas(), timeline.policy)
    weighted = peak_weighted(schedule, setting.freed)
    limit = setting.activation_limit
    return {
        **described,
        "makespan": json_number(timeline.makespan),
        "span": json_number(max(timeline.spans)),
        "bubble": {
            "makespan": json_number(timeline.bubble_makespan),
            "ideal": json_number(timeline.bubble_ideal),
            "span": json_number(timeline.bubble_span),
        },
        "exposed": {
            "gather": json_number(timeline.exposed_gather),
            "reduce": json_number(timeline.exposed_reduce),
        },
        "replicas": {
            "zero": timeline.policy.zero,
            "gathers": len(timeline.gather_ticks),
            "reductions": len(timeline.reduction_ticks),
            "added": json_number(timeline.makespan - alone.makespan),
        },
        "stream": _stream(setting, schedule),
        "idle": [
            {cause: json_number(value) for cause, value in causes._asdict().items()}
            for causes in idle(timeline)
        ],
        "peak_weighted": [json_number(value) for value in weighted],
        "activation_limit": None if limit is None else json_number(limit),
        "memory_accounting": setting.accounting,
        "fits": limit is None or max(setting.counted(schedule)) <= limit,
        "generate_seconds": generate_seconds,
        "simulate_seconds": seconds,
    }


def _stream(setting: Scenario, schedule: Schedule) -> dict[str, Any] | None:
    """Return the figures of a no-flush schedule; None for other schedules."""
    if schedule.updates is None:
        return None
    stream = setting.stream(schedule.name.partition(",")[0])
    times = window_times(stream, setting.cost(schedule.placement))
    return {
        "weights": setting.weight_versions,
        "window_microbatches": schedule.updates.window,
        "windows": schedule.microbatches // schedule.updates.window,
        **{name: json_number(value) for name, value in times._asdict().items()},
        "stages": [
            {name: json_number(value) for name, value in stage._asdict().items()}
            for stage in staleness(schedule)
        ],
    }


def lines(result: dict[str, Any]) -> list[str]:
    """Format the result of :func:`measure` as lines for a reader."""
    bubble, idle_by, limit = result["bubble"], result["idle"], result["activation_limit"]
    exposed, replicas = result["exposed"], result["replicas"]
    causes = {cause: sum(rank[cause] for rank in idle_by) for cause in idle_by[0]}
    order = "" if result["bitwise_order"] else "NOT "
    rows = {
        "sizes": f"{result['ranks']} ranks, {result['microbatches']:g} micro-batches, chunks "
        f"{result['chunks']}, slices {result['slices']}, placement {result['placement']}",
        "valid": f"{result['ops']:,} operations; gradients {order}in micro-batch order",
        "time": f"makespan {result['makespan']:g}, longest span of a rank {result['span']:g}",
        "bubble": f"{bubble['makespan']:.2%} of the makespan, {bubble['ideal']:.2%} of the ideal "
        f"time, {bubble['span']:.2%} of the longest span",
        "idle": ", ".join(f"{cause} {value:g}" for cause, value in causes.items())
        + " (summed over ranks)",
        "held": f"{_per_rank(result['peak_held'])} micro-batches of a full rank, from F to W",
        "weighted": f"{_per_rank(result['peak_weighted'])}, with what I frees",
        "weights": f"{_per_rank(result['weight_copies'])} of a full rank",
        "sent": f"{result['messages']:,} messages, as much as {result['volume']:g} of a whole "
        "micro-batch",
        "took": f"{result['generate_seconds']:.3f} s to generate, "
        f"{result['simulate_seconds']:.3f} s to simulate",
    }
    if "deviating" in result:
        rows["deviating"] = "makespan {makespan:g}, within the {window} next operations".format(
            **result["deviating"]
        )
    if replicas["gathers"] or replicas["reductions"]:
        rows["replicas"] = (
            f"ZeRO-{replicas['zero']}: {replicas['gathers']:,} gathers and "
            f"{replicas['reductions']:,} reductions add {replicas['added']:g} to the makespan"
        )
    if any(exposed.values()):
        rows["exposed"] = (
            f"{exposed['gather']:g} of the gathers, before the first operation; "
            f"{exposed['reduce']:g} of the reductions, after the last"
        )
    if result["stream"] is not None:
        rows["window"] = (
            "{window:g} in the steady state; {fill:g} until every rank works; a pause costs "
            "{pause:g}"
        ).format(**result["stream"])
    if limit is not None:
        fits = "fits" if result["fits"] else "EXCEEDED"
        rows["limit"] = f"{limit:g}, {result['memory_accounting']}: {fits}"
    table = [] if result["stream"] is None else stale_table(result["stream"]["stages"])
    return [result["schedule"], *(f"  {what:9} {words}" for what, words in rows.items()), *table]


def stale_table(stages: list[dict[str, Any]]) -> list[str]:
    """Format the staleness and the number of kept weight versions of each stage as table rows."""
    rows = [("stage", "updates behind", "mean", "weights kept")]
    for number, stage in enumerate(stages):
        least, most = stage["least"], stage["most"]
        behind = f"{least}" if least == most else f"{least} to {most}"
        rows.append((f"{number}", behind, f"{float(stage['mean']):g}", f"{stage['kept']}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _per_rank(values: list[int | float]) -> str:
    """Format one figure per rank: one number if all are equal, else all figures (at most 16) or
    their range."""
    if min(values) == max(values):
        return f"{values[0]:g}"
    if len(values) <= 16:
        return " ".join(f"{value:g}" for value in values)
    return f"{min(values):g} to {max(values):g}"
