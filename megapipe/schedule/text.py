"""Schedules as CSV text: one row per rank, one cell per operation.

Cells are those of torch.distributed.pipelining's compute-only CSV: ``2F5`` is the forward of
micro-batch 5 at stage 2, ``(0F4;3B1)OVERLAP_F_B`` a joined pair. ``2F5.1`` works on slice 1 of
micro-batch 5. ``2F5@3`` reads weight version 3, ``2F5@3+1`` this version predicted one update
ahead, and ``2U4`` is the update of stage 2 with the gradients of update window 4. A micro-batch
runs on the ranks in whose rows its cells are, so directions are not written. Lines before the first
row have what cells cannot express: the sizes of micro-batches, the stages that recompute, and those
that span all ranks (their cells are in every row). A no-flush schedule also has the number of
micro-batches per update window, `waits` if an update waits for all ranks, and `follows` if
backwards read the same weights as their forwards (:class:`~megapipe.schedule.ir.Updates`)::

    # sizes 1/2 1/2 1 1
    # recompute 0 1 2
    # spanning 0 5
    # window 4 waits follows

:func:`to_torch_csv` writes only what torch's ``_load_csv`` can read; torch adds sends and receives.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import repeat

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Read, Schedule, Updates, pack, packed
from megapipe.schedule.placement import Placement

_CELL = re.compile(r"(\d+)([FBIWRU])(\d+)(?:\.(\d+))?(?:@(\d+)([+-]\d+(?:/\d+)?)?)?")
_JOINED = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def to_csv(schedule: Schedule) -> str:
    """Return a schedule as CSV text."""
    text = io.StringIO()
    if schedule.sizes:
        text.write(f"# sizes {' '.join(map(str, schedule.sizes))}\n")
    if schedule.recompute:
        text.write(f"# recompute {' '.join(map(str, sorted(schedule.recompute)))}\n")
    if schedule.placement.spanning:
        text.write(f"# spanning {' '.join(map(str, sorted(schedule.placement.spanning)))}\n")
    updates = schedule.updates
    if updates is not None:
        promises = [name for name in ("waits", "follows") if getattr(updates, name)]
        text.write(f"# window {' '.join([str(updates.window), *promises])}\n")
    writer = csv.writer(text, lineterminator="\n")
    for rank in range(len(schedule.ops)):
        ops = schedule.rank_ops(rank)
        reads = updates.reads[rank] if updates is not None else repeat(None, len(ops))
        writer.writerow(_cells(zip(ops, reads, strict=True)))
    return text.getvalue()


def _cells(ops: Iterable[tuple[Op, Read | None]]) -> Iterator[str]:
    first = None
    for op, read in ops:
        cell = str(op) if read is None or op.kind == Kind.U else f"{op}@{read}"
        if op.joined:
            first = cell
        elif first is None:
            yield cell
        else:
            yield f"({first};{cell})OVERLAP_F_B"
            first = None


def from_csv(text: str, *, name: str = "csv", forward_only: bool = False) -> Schedule:
    """Read a schedule from CSV of :func:`to_csv`, or compute-only CSV of torch's pipelining.

    Placement, micro-batches and slices follow from the cells. So directions without micro-batches
    and ranks without operations are lost. Empty cells (idle time slots) are skipped.

    Raises:
        ScheduleError: an unreadable cell, a micro-batch with one stage on two ranks, a stage or
            micro-batch that is missing.
    """
    sizes: tuple[Fraction, ...] | None = None
    recompute: frozenset[int] = frozenset()
    spanning: frozenset[int] = frozenset()
    window: list[str] = []
    lists: list[list[tuple[Op, Read | None]]] = []
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ScheduleError(f"schedule {name}: not a table of cells: {error}") from None
    for number, row in enumerate(rows, start=1):
        where = f"schedule {name}: line {number}"
        if row and row[0].startswith("#"):
            words = row[0].lstrip("# ").split()
            try:
                if words[:1] == ["sizes"]:
                    sizes = tuple(map(Fraction, words[1:]))
                elif words[:1] == ["recompute"]:
                    recompute = frozenset(map(int, words[1:]))
                elif words[:1] == ["spanning"]:
                    spanning = frozenset(map(int, words[1:]))
                elif words[:1] == ["window"]:
                    window = [str(int(words[1])), *words[2:]]
            except IndexError:
                raise ScheduleError(f"{where}: {row[0]!r} has no number") from None
            except (ValueError, ZeroDivisionError):
                raise ScheduleError(f"{where}: {row[0]!r} is not a list of numbers") from None
        elif row:
            lists.append(
                [
                    op
                    for column, cell in enumerate(row, start=1)
                    if cell.strip()
                    for op in _parse(cell.strip(), f"{where}, cell {column}")
                ]
            )
    _check_versions(name, lists, bool(window))
    placement, direction = _placement(name, [[op for op, _ in row] for row in lists], spanning)
    ops = [op for row in lists for op, _ in row]
    schedule = Schedule(
        name=name,
        placement=placement,
        microbatches=len(direction),
        ops=tuple(packed(pack(*op) for op, _ in row) for row in lists),
        forward_only=forward_only,
        slices=1 + max(op.slice for op in ops),
        sizes=sizes,
        recompute=recompute,
        updates=_updates(window, lists) if window else None,
    )
    return replace(schedule, direction=direction) if any(direction) else schedule


def _check_versions(name: str, lists: list[list[tuple[Op, Read | None]]], stale: bool) -> None:
    """Check that every cell names the weight version that it reads if the text has a ``# window``
    line, and that no cell does otherwise."""
    for op, read in (pair for row in lists for pair in row):
        if op.kind == Kind.U and not stale:
            what = "an update needs the line '# window N' before the first row"
        elif op.kind != Kind.U and stale and read is None:
            what = f"it does not say which weight version it reads, as in {op}@0"
        elif read is not None and not stale:
            what = "a version needs the line '# window N' before the first row"
        else:
            continue
        raise ScheduleError(f"schedule {name}: {op}: {what}")


def _updates(window: list[str], lists: list[list[tuple[Op, Read | None]]]) -> Updates:
    return Updates(
        window=int(window[0]),
        reads=tuple(
            tuple(Read(op.microbatch + 1) if read is None else read for op, read in row)
            for row in lists
        ),
        waits="waits" in window,
        follows="follows" in window,
    )


def _placement(
    name: str, lists: list[list[Op]], spanning: frozenset[int]
) -> tuple[Placement, tuple[int, ...]]:
    """Return the placement that the cells imply, and the direction of each micro-batch.

    Every different sequence of ranks that a micro-batch visits is a direction. Directions are
    numbered in the order of their first micro-batches.
    """
    ranks_of: dict[int, dict[int, int]] = {}
    for rank, ops in enumerate(lists):
        for op in ops:
            if op.kind == Kind.U:
                continue
            home = 0 if op.stage in spanning else rank
            known = ranks_of.setdefault(op.microbatch, {}).setdefault(op.stage, home)
            if known != home:
                raise ScheduleError(
                    f"schedule {name}: {op} is in row {rank + 1}, but row {known + 1} has stage "
                    f"{op.stage} of micro-batch {op.microbatch} already; all operations of a stage "
                    "on a micro-batch must be in one row"
                )
    if not ranks_of:
        raise ScheduleError(f"schedule {name}: it has no operation")
    stages = 1 + max(max(visited) for visited in ranks_of.values())
    paths: dict[tuple[int, ...], int] = {}
    direction = []
    for microbatch in range(1 + max(ranks_of)):
        visits = ranks_of.get(microbatch, {})
        missing = next((stage for stage in range(stages) if stage not in visits), None)
        if missing is not None:
            raise ScheduleError(
                f"schedule {name}: {Op(Kind.F, missing, microbatch)} is missing: stages go up to "
                f"{stages - 1}, micro-batches up to {max(ranks_of)}"
            )
        path = tuple(visits[stage] for stage in range(stages))
        direction.append(paths.setdefault(path, len(paths)))
    return Placement(len(lists), tuple(paths), spanning), tuple(direction)


def _parse(cell: str, where: str) -> list[tuple[Op, Read | None]]:
    joined = _JOINED.fullmatch(cell)
    if joined:
        ((first, read),), (second,) = (_parse(part, where) for part in joined.groups())
        return [(first._replace(joined=True), read), second]
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ScheduleError(
            f"{where}: {cell!r} is not an operation; write stage, kind (F, B, I, W, R, U) and "
            "micro-batch, as in 2F5"
        )
    stage, kind, microbatch, part, version, ahead = match.groups()
    read = None if version is None else Read(int(version), Fraction(ahead or 0))
    return [(Op(Kind[kind], int(stage), int(microbatch), int(part or 0)), read)]


def to_torch_csv(schedule: Schedule) -> str:
    """Return the compute-only CSV of a valid schedule, as torch's runtime reads it.

    Joined pairs become OVERLAP_F_B. torch runs the two operations of such a pair one after the
    other unless it is given a custom function for OVERLAP_F_B.

    Raises:
        ScheduleError: the schedule has something that torch's runtime does not support.
    """
    for present, what in (
        (schedule.forward_only, "a schedule without backward"),
        (len(schedule.placement.table) > 1, "more than one direction"),
        (schedule.slices > 1, "slices of a sequence"),
        (schedule.sizes is not None, "micro-batches of unequal size"),
        (schedule.recompute, "recomputation by the schedule"),
        (schedule.placement.spanning, "a stage that spans all ranks"),
        (schedule.updates is not None, "updates within the schedule"),
    ):
        if present:
            raise ScheduleError(
                f"schedule {schedule.name}: torch.distributed.pipelining cannot run {what}; it "
                "knows F, B, I and W of whole micro-batches, each stage on one rank"
            )
    return to_csv(schedule)
