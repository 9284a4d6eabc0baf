"""Timelines in the JSON trace format that ui.perfetto.dev and chrome://tracing open.

A timeline is a process of the trace and a rank is a thread of it, so that a predicted and a
measured timeline of the same schedule lie below each other in one picture. A rank that gathers
parameters or reduces gradients has a second thread for that. Arrows are messages between ranks;
counters are activations held.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.memory import curve
from megapipe.schedule.timing.simulate import Timeline

Event = dict[str, Any]


def trace(timelines: Mapping[str, Timeline], *, unit: float = 1000.0) -> dict[str, Any]:
    """Make a trace of timelines by name, ready for :func:`json.dump`.

    Args:
        timelines: simulated or measured timelines, by the name to show.
        unit: microseconds per unit of the timelines' time; 1e6 for seconds.
    """
    events: list[Event] = []
    for number, (name, timeline) in enumerate(timelines.items()):
        events.append(_about("process_name", number, 0, name=f"{name}: {timeline.schedule.name}"))
        for rank in range(len(timeline.starts)):
            events.append(_about("thread_name", number, rank, name=f"rank {rank}"))
            events.append(_about("thread_sort_index", number, rank, sort_index=2 * rank))
            events.extend(_operations(timeline, number, rank, unit))
            if not timeline.schedule.forward_only:
                events.extend(_counter(timeline, number, rank, unit))
        events.extend(_collectives(timeline, number, unit))
        events.extend(_arrows(timeline, number, unit))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _about(what: str, process: int, thread: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _operations(timeline: Timeline, process: int, rank: int, unit: float) -> Iterator[Event]:
    schedule = timeline.schedule
    times = zip(timeline.starts[rank], timeline.ends[rank], strict=True)
    for op, (start, end) in zip(schedule.rank_ops(rank), times, strict=True):
        yield {
            "ph": "X",
            "name": str(op),
            "cat": op.kind.name,
            "pid": process,
            "tid": rank,
            "ts": float(start) * unit,
            "dur": float(end - start) * unit,
            "args": {
                "stage": op.stage,
                "microbatch": op.microbatch,
                "slice": op.slice,
                "direction": schedule.direction_of(op.microbatch),
            },
        }


def _counter(timeline: Timeline, process: int, rank: int, unit: float) -> Iterator[Event]:
    for time, amount in curve(timeline, rank):
        yield {
            "ph": "C",
            "name": f"activations held by rank {rank}",
            "pid": process,
            "ts": float(time) * unit,
            "args": {"micro-batches": float(amount)},
        }


def _collectives(timeline: Timeline, process: int, unit: float) -> Iterator[Event]:
    """Yield gathers and reductions, for each rank in a thread below that of its operations."""
    ranks = len(timeline.starts)
    both = {"gather": timeline.gathers, "reduce": timeline.reductions}
    for rank in sorted({each.rank for intervals in both.values() for each in intervals}):
        words = f"rank {rank}, data-parallel"
        yield _about("thread_name", process, ranks + rank, name=words)
        yield _about("thread_sort_index", process, ranks + rank, sort_index=2 * rank + 1)
    for what, intervals in both.items():
        for stage, rank, start, end in intervals:
            yield {
                "ph": "X",
                "name": f"{what} {stage}",
                "cat": what,
                "pid": process,
                "tid": ranks + rank,
                "ts": float(start) * unit,
                "dur": float(end - start) * unit,
                "args": {"stage": stage},
            }


def _arrows(timeline: Timeline, process: int, unit: float) -> Iterator[Event]:
    """Yield an arrow from each operation to the operation on another rank that needs its
    message."""
    made: dict[tuple[bool, int, int, int], tuple[int, float, float]] = {}
    uses: list[tuple[tuple[bool, int, int, int], int, float]] = []
    for rank, (starts, ends) in enumerate(zip(timeline.starts, timeline.ends, strict=True)):
        for op, start, end in zip(timeline.schedule.rank_ops(rank), starts, ends, strict=True):
            if op.kind in (Kind.W, Kind.R, Kind.U):
                continue
            key = _key(op)
            made[key] = rank, float(start) * unit, float(end) * unit
            source = op.stage + (1 if key[0] else -1)
            uses.append(((key[0], source, *key[2:]), rank, float(start) * unit))
    for number, (key, rank, start) in enumerate(uses):
        if key not in made or made[key][0] == rank:
            continue
        source_rank, source_start, source_end = made[key]
        inside = source_end - (source_end - source_start) / 1000  # the end is the next one's start
        shared = {"name": "message", "cat": "message", "id": f"{process}.{number}", "pid": process}
        yield {**shared, "ph": "s", "tid": source_rank, "ts": inside}
        yield {**shared, "ph": "f", "bp": "e", "tid": rank, "ts": start}


def _key(op: Op) -> tuple[bool, int, int, int]:
    """Return a key for an operation's output: (is it a backward, stage, micro-batch, slice)."""
    return op.kind != Kind.F, op.stage, op.microbatch, op.slice
