"""Programs of a no-flush schedule: one per rank and segment, equal for all windows in steady state.

The first update windows are lowered as an ordinary schedule, and its programs are cut between
windows. Micro-batches of a segment are counted from its window, so that equal segments have one
program.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.schedule.async_schedules.async_schedule import AsyncSchedule, Step, finite, parts
from megapipe.schedule.ir import Kind, Op, Read
from megapipe.schedule.lower import lower
from megapipe.schedule.program import Action, ActionKind, Program


class InFlightMessage(NamedTuple):
    """A message that is in flight at the end of a program segment and received in a later one."""

    peer: int
    """Rank that sends the message."""
    message: Op
    """Operation that makes the message; its micro-batch counts from the next segment's window."""
    read: Read
    """Weights that the receiving operation reads, relative to the next segment's window."""


@dataclass(frozen=True)
class ProgramSegment:
    """Program of a rank for one update window, or for the initial fill of the pipeline."""

    program: Program
    """Actions, with micro-batches counted from the start of the segment's window. In a U this
    number is n if its gradients are those of the n-th window before the segment's window."""
    reads: tuple[Read, ...]
    """Weights that the operation of each action reads, relative to the version that the segment's
    window changes. The operation of a message is the one that sends or receives it."""
    in_flight: tuple[InFlightMessage, ...]
    """Messages to this rank that are in flight at the end of the segment, in the order in which
    they are received."""
    windows: int
    """Number of update windows that the segment covers: 1, or 0 for the initial fill."""


@dataclass(frozen=True)
class AsyncPrograms:
    """Programs of a run's consecutive update windows: the fill, then one segment per window."""

    fill: tuple[ProgramSegment, ...]
    """Fill of each rank: the forwards that an empty pipeline runs first."""
    segments: tuple[tuple[ProgramSegment, ...], ...]
    """Segments: segments[window][rank]."""


def run(stream: AsyncSchedule, windows: int) -> AsyncPrograms:
    """Return the programs of the first `windows` update windows of a no-flush schedule."""
    schedule = finite(stream, windows)
    by_rank = [
        list(_parts(program.actions, steps, stream.microbatches))
        for program, steps in zip(lower(schedule, proved=True), parts(stream, windows), strict=True)
    ]
    made: list[list[ProgramSegment]] = []
    for rank, own in enumerate(by_rank):
        made.append([])
        for number, part in enumerate(own):
            waiting = _in_flight(by_rank, rank, number, stream.microbatches)
            actions, reads = zip(*part, strict=True) if part else ((), ())
            made[-1].append(
                ProgramSegment(Program(rank, actions), reads, tuple(waiting), min(number, 1))
            )
    fill, *segments = zip(*made, strict=True)
    return AsyncPrograms(fill, tuple(segments[:windows]))


class Runs:
    """Programs of runs of any number of update windows. In a long run, equal windows share their
    segments."""

    def __init__(self, stream: AsyncSchedule) -> None:
        self._stream = stream
        self._ends = stream.ahead + 1
        """Number of update windows, at the beginning and also at the end of a run, whose programs
        can differ from the steady state."""
        self._most = 2 * self._ends + 1
        self._made: dict[int, AsyncPrograms] = {}

    def of(self, windows: int) -> AsyncPrograms:
        """Return the programs of a run of `windows` update windows. For a long run, return those of
        a shorter run; :meth:`part` maps the long run's windows to segments of the shorter run."""
        windows = min(windows, self._most)
        if windows not in self._made:
            self._made[windows] = run(self._stream, windows)
        return self._made[windows]

    def part(self, number: int, windows: int) -> tuple[ProgramSegment, ...]:
        """Return each rank's segment of update window `number` in a run of `windows` windows."""
        if windows > self._most:
            left = windows - number
            number = self._most - left if left <= self._ends else min(number, self._ends)
        return self.of(windows).segments[number]


_Steps = list[tuple[Action, Read]]


def _parts(
    actions: tuple[Action, ...], of_rank: list[tuple[int, list[Step]]], size: int
) -> Iterator[_Steps]:
    """Split the actions of a rank, with the weights that they read, into the rank's parts: the fill
    and a segment per window. A message is received in the part of the operation that needs it, and
    sent in the part of the operation that makes it."""
    index = 0
    for window, steps in of_rank:
        own: list[Action] = []
        computed = 0
        while index < len(actions):
            action = actions[index]
            if action.do != ActionKind.SEND and computed == len(steps):
                break
            computed += action.do == ActionKind.COMPUTE
            own.append(_counted_from(action, window, size))
            index += 1
        reads = dict(steps)
        yield [(action, reads[_operation(action)]) for action in own]


def _operation(action: Action) -> Op:
    """Return the operation that an action runs, or for which it sends or receives a message."""
    if action.do == ActionKind.COMPUTE:
        return Op(action.kind, action.stage, action.microbatch)
    kind, stage = (Kind.F, 1) if action.kind == Kind.F else (Kind.B, -1)
    return Op(
        kind, action.stage + (stage if action.do == ActionKind.RECV else 0), action.microbatch
    )


def _counted_from(action: Action, window: int, size: int) -> Action:
    if action.kind == Kind.U:
        return action._replace(microbatch=window - action.microbatch)
    return action._replace(microbatch=action.microbatch - window * size)


def _in_flight(
    by_rank: list[list[_Steps]], rank: int, number: int, size: int
) -> Iterator[InFlightMessage]:
    """Yield the messages to a rank that are in flight when all ranks have finished part `number`
    (0: the fill, then one part per window)."""
    sent = Counter(
        peer
        for peer, its_parts in enumerate(by_rank)
        for part in its_parts[: number + 1]
        for action, _ in part
        if action.do == ActionKind.SEND and action.peer == rank
    )
    for part in by_rank[rank][: number + 1]:
        sent.subtract(action.peer for action, _ in part if action.do == ActionKind.RECV)
    for later, part in enumerate(by_rank[rank][number + 1 :]):
        for action, read in part:
            if action.do == ActionKind.RECV and sent[action.peer] > 0:
                sent[action.peer] -= 1
                message = Op(action.kind, action.stage, action.microbatch + later * size)
                yield InFlightMessage(
                    action.peer, message, read._replace(version=read.version + later)
                )
