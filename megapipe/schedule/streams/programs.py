"""Programs of a stream: one per rank from cut to cut, the same for all windows in the steady state.

The first windows of a stream are an ordinary schedule, whose programs are cut where its windows
are. Micro-batches of a part are counted from its window, so that equal parts are one program.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.schedule.ir import Kind, Op, Read
from megapipe.schedule.lower import lower
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.streams.stream import AsyncSchedule, Step, finite, parts


class InFlightMessage(NamedTuple):
    """A message that is sent before a cut and received behind it."""

    peer: int
    """The rank that sends it."""
    message: Op
    """The operation that makes it, counted from the window behind the cut."""
    read: Read
    """The weights that the operation reads that it is for, counted likewise."""


@dataclass(frozen=True)
class ProgramSegment:
    """A rank's program from one cut to the next, or of the fill."""

    program: Program
    """Micro-batches are counted from the part's window; that of a U says how many windows before
    the part's it updates by."""
    reads: tuple[Read, ...]
    """The weights that each operation reads, counted from the version that the part's window
    changes; of a message those that the operation reads which sends or receives it."""
    under_way: tuple[InFlightMessage, ...]
    """Messages on their way to this rank at the end, in the order in which they are received."""
    windows: int
    """From its window to the one behind its end: 1, and 0 for the fill."""


@dataclass(frozen=True)
class AsyncPrograms:
    """The programs of some windows in a row, from the fill to where the forwards run out."""

    fill: tuple[ProgramSegment, ...]
    """By rank."""
    segments: tuple[tuple[ProgramSegment, ...], ...]
    """By window and rank."""


def run(stream: AsyncSchedule, windows: int) -> AsyncPrograms:
    """The programs of the first windows of a stream."""
    schedule = finite(stream, windows)
    by_rank = [
        list(_parts(program.actions, steps, stream.microbatches))
        for program, steps in zip(lower(schedule, proved=True), parts(stream, windows), strict=True)
    ]
    made: list[list[ProgramSegment]] = []
    for rank, own in enumerate(by_rank):
        made.append([])
        for number, part in enumerate(own):
            waiting = _under_way(by_rank, rank, number, stream.microbatches)
            actions, reads = zip(*part, strict=True) if part else ((), ())
            made[-1].append(
                ProgramSegment(Program(rank, actions), reads, tuple(waiting), min(number, 1))
            )
    fill, *segments = zip(*made, strict=True)
    return AsyncPrograms(fill, tuple(segments[:windows]))


class Runs:
    """The programs of runs of any number of windows; those of long ones share their parts."""

    def __init__(self, stream: AsyncSchedule) -> None:
        self._stream = stream
        self._ends = stream.ahead + 1
        """Windows at each end of a run whose programs may be unlike those in between."""
        self._most = 2 * self._ends + 1
        self._made: dict[int, AsyncPrograms] = {}

    def of(self, windows: int) -> AsyncPrograms:
        """The run whose parts those of a run of so many windows are; see :meth:`part`."""
        windows = min(windows, self._most)
        if windows not in self._made:
            self._made[windows] = run(self._stream, windows)
        return self._made[windows]

    def part(self, number: int, windows: int) -> tuple[ProgramSegment, ...]:
        """By rank, the segment of window `number` in a run of so many windows."""
        if windows > self._most:
            left = windows - number
            number = self._most - left if left <= self._ends else min(number, self._ends)
        return self.of(windows).segments[number]


_Steps = list[tuple[Action, Read]]


def _parts(
    actions: tuple[Action, ...], of_rank: list[tuple[int, list[Step]]], size: int
) -> Iterator[_Steps]:
    """The actions of a rank, with what they read, cut where its parts end: messages are received
    in the part of the operation that needs them, and sent in that of the operation that makes
    them."""
    place = 0
    for window, steps in of_rank:
        own: list[Action] = []
        computed = 0
        while place < len(actions):
            action = actions[place]
            if action.do != ActionKind.SEND and computed == len(steps):
                break
            computed += action.do == ActionKind.COMPUTE
            own.append(_counted_from(action, window, size))
            place += 1
        reads = dict(steps)
        yield [(action, reads[_operation(action)]) for action in own]


def _operation(action: Action) -> Op:
    """The operation that is run, or for which a message is sent or received."""
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


def _under_way(
    by_rank: list[list[_Steps]], rank: int, number: int, size: int
) -> Iterator[InFlightMessage]:
    """Messages on their way to a rank when all are through with a part."""
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
