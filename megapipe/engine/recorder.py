"""Measured timelines: when each operation of a step ran, on every rank.

A :class:`Recorder` stamps the operations of one rank; the ranks' :class:`Record` s together become
a :class:`~megapipe.schedule.timing.simulate.Timeline`, which is drawn, traced and analysed as a
simulated one is, and costs that can be given back to the simulator.

Clocks. On the CPU a stamp is CLOCK_MONOTONIC, which all ranks of a host share. On a GPU it is an
event of the current stream, counted from one that is recorded at :meth:`Recorder.begin` when the
device is idle; it is placed in the host's time with an error of one kernel launch (about 10
microseconds). Hosts do not share a clock: their earliest ranks are taken to begin at the same
moment. If all ranks pass a barrier directly before `begin`, the error is at most the time that the
barrier takes to release all of them.
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
from megapipe.schedule.cost import Cost
from megapipe.schedule.ir import WORK, Kind, Op, Schedule
from megapipe.schedule.streams.excerpt import Excerpt
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
    """An operation that ran; seconds since the record's beginning."""

    op: Op
    start: float
    end: float


class Record(NamedTuple):
    """The operations of one rank in one step, in the order in which they ran."""

    host: str
    began: float
    """Seconds on the host's clock."""
    events: list[Event]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Record:
        """A record out of what JSON makes of one."""
        host, began, events = values
        ops = [(Op(Kind(kind), *rest), start, end) for (kind, *rest), start, end in events]
        return cls(host, began, [Event(*event) for event in ops])


class Recorder:
    """Stamps the operations of one rank: `begin` a step, then call what :meth:`timed` returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        self._stamp: Callable[[], Any] = _event if self._on_gpu else time.perf_counter
        self._began = 0.0
        self._origin: Any = 0.0
        self._stamps: list[tuple[Op, Any, Any]] = []

    def begin(self) -> None:
        """Forget what was recorded and count the time from here."""
        self._stamps.clear()
        if self._on_gpu:
            torch.cuda.synchronize(self.device)
        self._origin = self._stamp()
        self._began = time.perf_counter() if self._on_gpu else self._origin

    def timed(self, action: Computed, call: Callable[[], object]) -> Callable[[], None]:
        """`call`, which computes `action`, with a stamp before and after it."""
        op = Op(action.kind, action.stage, action.microbatch, action.slice)
        stamp, stamps = self._stamp, self._stamps

        def timed_call() -> None:
            start = stamp()
            call()
            stamps.append((op, start, stamp()))

        return timed_call

    def events(self) -> list[Event]:
        """The operations since `begin`; waits for a GPU to have run them."""
        if not self._on_gpu:
            origin = self._origin
            return [Event(op, start - origin, end - origin) for op, start, end in self._stamps]
        torch.cuda.synchronize(self.device)
        return [
            Event(op, self._origin.elapsed_time(start) / 1e3, self._origin.elapsed_time(end) / 1e3)
            for op, start, end in self._stamps
        ]

    def record(self) -> Record:
        """The step since `begin`, to be gathered from all ranks."""
        return Record(socket.gethostname(), self._began, self.events())


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def timeline(schedule: Schedule, records: Sequence[Record]) -> Timeline:
    """One step of all pipeline ranks, in seconds from the first start; `records` are by rank.

    Joined operations are given the time from the start of the first to the end of the second.

    Raises:
        ScheduleError: a rank ran something else than its list, or in another order.
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
    """Some windows of a stream, in seconds from the first start; `records` are by rank, and have
    `before` operations before those of these windows. They count micro-batches from the window in
    which an operation ran.

    Raises:
        ScheduleError: a rank ran something else than its list, or in another order.
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
    """Seconds per operation on a whole micro-batch: medians by stage and kind.

    `records` are of all ranks, over any number of steps. What was not measured is filled in: a B
    is an I that leaves nothing for W, an I and a W make a B, and R costs what F does. Where I or
    B has recomputed, the time of R is subtracted, since the simulator adds it. The share of a slice
    is that of its medians in the sum of all medians. An operation of no length was not measured.

    Raises:
        ScheduleError: a stage without a forward in the records.
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
    """The median of a kind at a stage and slice, without recomputation; None if it never ran."""
    plain = medians.get((kind, stage, part, False))
    recomputed = medians.get((kind, stage, part, True))
    if plain is not None or recomputed is None:
        return plain
    forward = medians.get((Kind.F, stage, part, False), 0.0)
    return max(0.0, recomputed - medians.get((Kind.R, stage, part, False), forward))


def _filled(schedule: Schedule, stage: int, seconds: list[list[float | None]]) -> list[float]:
    """Times of a stage by kind, from those by kind and slice."""
    F, B, I, W, R = (  # noqa: E741
        None if None in parts else sum(part or 0.0 for part in parts) for parts in seconds
    )
    if F is None:
        raise ScheduleError(
            f"schedule {schedule.name}: no forward of stage {stage} was recorded; "
            "give the records of all ranks"
        )
    if I is None:
        I, W = B or 0.0, 0.0  # noqa: E741
    W = W or 0.0
    return [F, I + W if B is None else B, I, W, F if R is None else R]
