"""Measured timelines: when each operation of a step ran, on every rank.

A :class:`Recorder` takes time stamps of the operations of one rank. From the :class:`Record` s of
all ranks, :func:`timeline` builds a :class:`~megapipe.schedule.timing.simulate.Timeline`, which is
drawn, traced and analysed like a simulated one, and :func:`measured_cost` derives costs for
simulations.

Clocks. On the CPU a stamp is CLOCK_MONOTONIC, which all ranks of a host share. On a GPU a stamp is
an event of the current stream, relative to an event that :meth:`Recorder.begin` records when the
device is idle; relative to the host's clock the error is one kernel launch (about 10 microseconds).
Hosts do not share a clock: the earliest ranks of all hosts are assumed to start at the same moment.
If all ranks pass a barrier directly before `begin`, the error is at most the time that the barrier
takes to release all of them.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megapipe.errors import ScheduleError
from megapipe.schedule.async_schedules.excerpt import Excerpt
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import WORK, Kind, Op, Schedule
from megapipe.schedule.timing.simulate import Timeline


class Computed(Protocol):
    """Properties of an operation that a recorder needs."""

    @property
    def kind(self) -> Kind: ...
    @property
    def stage(self) -> int: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def slice(self) -> int: ...


class Event(NamedTuple):
    """An operation that ran; start and end in seconds since the record began."""

    op: Op
    start: float
    end: float


class Record(NamedTuple):
    """The operations of one rank in one step, in the order in which they ran."""

    host: str
    began: float
    """Start of the record, in seconds on the host's clock."""
    events: list[Event]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Record:
        """Build a record from its values as read from JSON."""
        host, began, events = values
        ops = [(Op(Kind(kind), *rest), start, end) for (kind, *rest), start, end in events]
        return cls(host, began, [Event(*event) for event in ops])


class Recorder:
    """Takes time stamps of the operations of one rank: call :meth:`begin` at the start of a step,
    then what :meth:`timed` returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._stamp: Callable[[], Any] = _event if self._on_gpu else time.perf_counter
        self._began = 0.0
        self._origin: Any = 0.0
        self._stamps: list[tuple[Op, Any, Any]] = []

    def begin(self) -> None:
        """Clear the recorded operations, and measure time from now."""
        self._stamps.clear()
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        self._origin = self._stamp()
        self._began = time.perf_counter() if self._on_gpu else self._origin

    def timed(self, action: Computed, call: Callable[[], object]) -> Callable[[], None]:
        """Wrap `call`, which computes `action`, with a stamp before and after it."""
        op = Op(action.kind, action.stage, action.microbatch, action.slice)
        stamp, stamps = self._stamp, self._stamps

        def timed_call() -> None:
            start = stamp()
            call()
            stamps.append((op, start, stamp()))

        return timed_call

    def events(self) -> list[Event]:
        """Return the operations since `begin`, after waiting until a GPU has run them."""
        if not self._on_gpu:
            origin = self._origin
            return [Event(op, start - origin, end - origin) for op, start, end in self._stamps]
        torch.cuda.synchronize(self.device)
        return [
            Event(op, self._origin.elapsed_time(start) / 1e3, self._origin.elapsed_time(end) / 1e3)
            for op, start, end in self._stamps
        ]

    def record(self) -> Record:
        """Return the operations since `begin`, to be gathered from all ranks."""
        return Record(socket.gethostname(), self._began, self.events())


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def timeline(schedule: Schedule, records: Sequence[Record]) -> Timeline:
    """Build the timeline of one step, in seconds from the first start; `records` are by rank.

    Joined operations both get the time from the start of the first to the end of the second.

    Raises:
        ScheduleError: a rank ran other operations than its list has, or in another order.
    """
    for rank, record in enumerate(records):
        _check_order(schedule, rank, record)
    began: dict[str, float] = {}
    for record in records:
        began[record.host] = min(record.began, began.get(record.host, record.began))
    offsets = [record.began - began[record.host] for record in records]
    zero = min(
        offset + record.events[0].start
        for offset, record in zip(offsets, records, strict=True)
        if record.events
    )
    starts: list[list[float]] = []
    ends: list[list[float]] = []
    for rank, (offset, record) in enumerate(zip(offsets, records, strict=True)):
        shift = offset - zero
        starts.append([event.start + shift for event in record.events])
        ends.append([event.end + shift for event in record.events])
        for index, op in enumerate(schedule.rank_ops(rank)):
            if op.joined:
                starts[rank][index + 1] = starts[rank][index]
                ends[rank][index] = ends[rank][index + 1]
    return Timeline(schedule, tuple(starts), tuple(ends), measured_cost(schedule, records))


def stream_timeline(cut: Excerpt, records: Sequence[Record], before: Sequence[int]) -> Timeline:
    """Build the timeline of an excerpt of a no-flush schedule, in seconds from the first start.

    `records`: one per rank. The micro-batch of an operation is counted from the update window in
    which the operation ran. `before`: number of operations in each record that precede the excerpt.

    Raises:
        ScheduleError: a rank ran other operations than its list has, or in another order.
    """
    assert cut.schedule.updates is not None
    size = cut.schedule.updates.window
    whole = []
    for rank, (record, skipped, alive) in enumerate(
        zip(records, before, cut.in_flight, strict=True)
    ):
        listed = cut.schedule.rank_ops(rank)
        own = record.events[skipped : skipped + len(listed) - alive]
        events = [Event(op, own[0].start, own[0].start) for op in listed[:alive]]
        for op, event in zip(listed[alive:], own, strict=False):
            alike = op.kind == Kind.U or (op.microbatch - event.op.microbatch) % size == 0
            same = op[:2] == event.op[:2] and alike
            events.append(event._replace(op=op) if same else event)
        whole.append(record._replace(events=events))
    return timeline(cut.schedule, whole)


def _check_order(schedule: Schedule, rank: int, record: Record) -> None:
    wanted = [op._replace(joined=False) for op in schedule.rank_ops(rank)]
    ran = [event.op for event in record.events]
    if ran == wanted:
        return
    index = next((i for i, (a, b) in enumerate(zip(ran, wanted, strict=False)) if a != b), None)
    if index is None:
        what = f"{len(ran)} operations ran, its list has {len(wanted)}"
    else:
        what = f"op {index} of its list is {wanted[index]}, but {ran[index]} ran"
    raise ScheduleError(f"schedule {schedule.name}: rank {rank}: {what}")


def measured_cost(schedule: Schedule, records: Iterable[Record]) -> Cost:
    """Return measured costs of operations on whole micro-batches: median seconds by stage and kind.

    `records`: records of all ranks, over any number of steps. Costs of kinds that did not run are
    derived: I costs as much as B, and W nothing; B the sum of I and W; R as much as F. If I or B
    recomputed, the time of R is subtracted, since the simulator adds it. A slice's share is the sum
    of its medians over the sum of all medians. Unmeasured operations (length 0) are skipped.

    Raises:
        ScheduleError: the records have no forward of some stage.
    """
    samples: dict[tuple[Kind, int, int, bool], list[float]] = defaultdict(list)
    for record in records:
        ahead = {(op.stage, op.microbatch) for op, _, _ in record.events if op.kind == Kind.R}
        for op, start, end in record.events:
            if start == end:
                continue
            recomputed = (
                op.kind in (Kind.I, Kind.B)
                and op.stage in schedule.recompute
                and (op.stage, op.microbatch) not in ahead
            )
            seconds = (end - start) / float(schedule.size_of(op.microbatch))
            samples[op.kind, op.stage, op.slice, recomputed].append(seconds)
    medians = {key: statistics.median(values) for key, values in samples.items()}
    parts = [
        {
            (kind, stage): _median_of(medians, kind, stage, part)
            for stage in range(schedule.placement.stages)
            for kind in WORK
        }
        for part in range(schedule.slices)
    ]
    rows = [
        _filled(schedule, stage, [[part[kind, stage] for part in parts] for kind in WORK])
        for stage in range(schedule.placement.stages)
    ]
    F, B, I, W, R = (tuple(column) for column in zip(*rows, strict=True))  # noqa: E741
    sums = [sum(seconds or 0.0 for seconds in part.values()) for part in parts]
    shares = tuple(part / sum(sums) for part in sums) if schedule.slices > 1 else None
    update = tuple(
        medians.get((Kind.U, stage, 0, False), 0.0) for stage in range(schedule.placement.stages)
    )
    return Cost(F=F, I=I, W=W, B=B, R=R, update=update if any(update) else 0, slices=shares)


def _median_of(
    medians: dict[tuple[Kind, int, int, bool], float], kind: Kind, stage: int, part: int
) -> float | None:
    """Return the median seconds of a kind at a stage and slice without recomputation, or None."""
    plain = medians.get((kind, stage, part, False))
    recomputed = medians.get((kind, stage, part, True))
    if plain is not None or recomputed is None:
        return plain
    forward = medians.get((Kind.F, stage, part, False), 0.0)
    return max(0.0, recomputed - medians.get((Kind.R, stage, part, False), forward))


def _filled(schedule: Schedule, stage: int, seconds: list[list[float | None]]) -> list[float]:
    """Sum a stage's seconds over slices, by kind; derive those of kinds that did not run."""
    F, B, I, W, R = (  # noqa: E741
        None if None in parts else sum(part or 0.0 for part in parts) for parts in seconds
    )
    if F is None:
        raise ScheduleError(
            f"schedule {schedule.name}: no forward of stage {stage} was recorded: pass the "
            "records of all ranks"
        )
    if I is None:
        I, W = B or 0.0, 0.0  # noqa: E741
    W = W or 0.0
    return [F, I + W if B is None else B, I, W, F if R is None else R]
