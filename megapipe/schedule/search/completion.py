"""Completion of a repetend: the warm-up before its iterations, and the drain after them.

A constraint solver orders a schedule whose first and last micro-batches are free and whose middle
ones are periodic: each block starts a period after it did for the micro-batch before. Free and
periodic micro-batches overlap as they like, so the order within an iteration is solved with the
warm-up and the drain. For more micro-batches than the model has, iterations are inserted: in one
period of the schedule, the *window*, each block runs once, and nothing that is free runs.
"""

from megapipe.schedule.search.blocks import Blocks, Starts
from megapipe.schedule.search.repetend import Repetend
from megapipe.schedule.search.solver import Model, Variable, add_blocks, ends, new_model, solved


def completed(blocks: Blocks, repetend: Repetend, microbatches: int, seconds: float) -> Starts:
    """Return the shortest schedule with the period of a repetend.

    At each end as many micro-batches are free as the repetend has in flight. If there are not more
    than these, the whole schedule is free.
    """
    free, period = repetend.depth, repetend.period
    middle = max(1, min(free + 1, microbatches - 2 * free))
    head = min(free, (microbatches - middle + 1) // 2)
    count = min(microbatches, head + middle + free)
    more = microbatches - count
    model = new_model("repetend")
    hint = repetend.starts(count)
    starts = add_blocks(model, blocks, hint)
    for row in starts:
        for before, after in zip(row[head:], row[head + 1 : head + middle], strict=False):
            model.add(after == before + period)
    window = model.new_int_var(0, ends(blocks, hint), "")
    if more:
        _add_window(model, blocks, starts, range(head, head + middle), window, period)
    makespan = model.new_int_var(0, ends(blocks, hint), "")
    for block, row in zip(blocks.all, starts, strict=True):
        model.add(makespan >= row[-1] + block.duration)
    model.minimize(makespan)
    values, *_ = solved(model, [window, *(start for row in starts for start in row)], seconds)
    at, found = 2 * free * period, hint
    if values is not None:
        at, found = values[0], [values[i : i + count] for i in range(1, len(values), count)]
    return _stretched(found, at, period, more)


def _add_window(
    model: Model,
    blocks: Blocks,
    starts: list[list[Variable]],
    periodic: range,
    window: Variable,
    period: int,
) -> None:
    """Let each block start once in the period that begins at `window`, for a periodic micro-batch,
    and let all free micro-batches run before or after."""
    for block, row in zip(blocks.all, starts, strict=True):
        model.add(row[periodic[0]] < window + period)
        model.add(row[periodic[-1]] >= window)
        if periodic[0] > 0:
            model.add(row[periodic[0] - 1] + block.duration <= window)
        if periodic[-1] + 1 < len(row):
            model.add(row[periodic[-1] + 1] >= window + period)


def _stretched(starts: Starts, window: int, period: int, more: int) -> Starts:
    """Insert `more` micro-batches by repeating the window."""
    result = []
    for row in starts:
        last = max((n for n, start in enumerate(row) if start < window + period), default=-1) + 1
        inserted = [row[last - 1] + (turn + 1) * period for turn in range(more)]
        result.append([*row[:last], *inserted, *(start + more * period for start in row[last:])])
    return result
