"""Lowering of a schedule to per-rank programs with explicit messages.

Every ordered pair of ranks that exchange messages has a one-way FIFO channel. The sender sends each
message directly after the operation that makes it. The receiver receives messages in that order and
as late as possible: directly before an operation it receives the message that the operation needs
and all earlier ones. Two joined operations count as one: messages for both are received before the
pair, and messages of both are sent after it. :mod:`megapipe.schedule.proof.validate` explains why
this cannot deadlock. Neighbouring stages on one rank pass tensors by reference, without an action.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.placement import Placement
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.schedule.proof.validate import validate


class _Message(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int
    slice: int


def lower(
    schedule: Schedule, ranks: Iterable[int] | None = None, *, proved: bool = False
) -> tuple[Program, ...]:
    """Return the programs of `ranks` (default: all), in that order.

    `proved`: the schedule has been validated already. Then only the lists of `ranks`, of the ranks
    that send to them, and of those ranks' senders are read.

    Raises:
        ScheduleError: the schedule is not valid, or a stage spans all ranks.
    """
    check_trainable(schedule)
    if not proved:
        validate(schedule)
    wanted = list(range(schedule.placement.ranks) if ranks is None else ranks)
    senders = {src for src, dst in pairs(schedule.placement) if dst in wanted}
    queues = _queues(schedule, senders.union(wanted))
    steps: dict[int, list[tuple[ActionKind, _Message, int]]] = {rank: [] for rank in wanted}
    known = {}  # (sender, message): messages from the receiver that came in before the send
    for rank in senders.union(wanted):
        received: dict[int, int] = defaultdict(int)
        for step in _steps(schedule, rank, queues):
            do, message, peer = step
            if do == ActionKind.RECV:
                received[peer] += 1
            elif do == ActionKind.SEND and peer in steps:
                known[rank, message] = received[peer]
            if rank in steps:
                steps[rank].append(step)
    programs = []
    for rank in wanted:
        acked: dict[int, int] = defaultdict(int)
        actions = []
        for do, message, peer in steps[rank]:
            acks = 0
            if do == ActionKind.RECV:
                acks = known[peer, message] - acked[peer]
                acked[peer] += acks
            actions.append(Action(do, *message, peer, acks))
        programs.append(Program(rank, tuple(actions)))
    return tuple(programs)


def check_trainable(schedule: Schedule) -> None:
    """Check that programs can be made of a schedule.

    Raises:
        ScheduleError: a stage spans all ranks; training has no such stages.
    """
    for stage in sorted(schedule.placement.spanning):
        raise ScheduleError(
            f"schedule {schedule.name}: stage {stage} spans all ranks; such a schedule can be "
            "searched, simulated and drawn, but not trained"
        )


def pairs(placement: Placement) -> list[tuple[int, int]]:
    """List the (source, destination) ranks between which training or validation sends messages."""
    used = set()
    for ranks in placement.table:
        for a, b in itertools.pairwise(ranks):
            if a != b:
                used |= {(a, b), (b, a)}
    return sorted(used)


def channel_rounds(used: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Group (source, destination) pairs into rounds: a rank creates at most one channel per round.

    A pair goes into the first round in which both its ranks are free. A chain of ranks needs 4
    rounds, and so does a loop of an even number of ranks.
    """
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for src, dst in sorted(set(used)):
        for index in range(len(rounds) + 1):
            if index == len(rounds):
                rounds.append([])
                busy.append(set())
            if src not in busy[index] and dst not in busy[index]:
                rounds[index].append((src, dst))
                busy[index] |= {src, dst}
                break
    return rounds


def _steps(
    schedule: Schedule, rank: int, queues: dict[tuple[int, int], list[_Message]]
) -> Iterator[tuple[ActionKind, _Message, int]]:
    """Yield a rank's actions, without acknowledgements, as (kind, message or operation, peer); the
    peer of an operation is -1."""
    queue_index = {
        message: index
        for (_, dst), queue in queues.items()
        if dst == rank
        for index, message in enumerate(queue)
    }
    taken: dict[int, int] = defaultdict(int)
    for together in _together(schedule.rank_ops(rank)):
        for op in together:
            source = _input(op, schedule)
            if source is not None:
                message, peer = source
                for index in range(taken[peer], queue_index[message] + 1):
                    yield ActionKind.RECV, queues[peer, rank][index], peer
                taken[peer] = max(taken[peer], queue_index[message] + 1)
        for op in together:
            yield ActionKind.COMPUTE, _message(op), -1
        for op in together:
            target = _output(op, schedule)
            if target is not None:
                yield ActionKind.SEND, *target


def _together(ops: Iterable[Op]) -> Iterator[list[Op]]:
    """Yield the operations of a list in groups: a joined pair, or a single other operation."""
    together: list[Op] = []
    for op in ops:
        together.append(op)
        if not op.joined:
            yield together
            together = []


def _queues(schedule: Schedule, into: Collection[int]) -> dict[tuple[int, int], list[_Message]]:
    """Return the messages of every channel to a rank of `into`, in sending order."""
    queues: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for rank in {src for src, dst in pairs(schedule.placement) if dst in into}:
        for op in schedule.rank_ops(rank):
            target = _output(op, schedule)
            if target is not None and target[1] in into:
                queues[rank, target[1]].append(target[0])
    return dict(queues)


def _input(op: Op, schedule: Schedule) -> tuple[_Message, int] | None:
    """Return the message that an operation needs from another rank, and that rank; or None."""
    if op.kind == Kind.F:
        return _crossing(Kind.F, op.stage - 1, op, schedule, op.stage - 1)
    if op.kind in (Kind.B, Kind.I):
        return _crossing(Kind.I, op.stage + 1, op, schedule, op.stage + 1)
    return None


def _output(op: Op, schedule: Schedule) -> tuple[_Message, int] | None:
    """Return the message that an operation makes for another rank, and that rank; or None."""
    if op.kind == Kind.F:
        return _crossing(Kind.F, op.stage, op, schedule, op.stage + 1)
    if op.kind in (Kind.B, Kind.I):
        return _crossing(Kind.I, op.stage, op, schedule, op.stage - 1)
    return None


def _crossing(
    kind: Kind, producer: int, op: Op, schedule: Schedule, other: int
) -> tuple[_Message, int] | None:
    rank_of = schedule.placement.table[schedule.direction_of(op.microbatch)]
    if not 0 <= other < len(rank_of) or rank_of[other] == rank_of[op.stage]:
        return None
    return _Message(kind, producer, op.microbatch, op.slice), rank_of[other]


def _message(op: Op) -> _Message:
    return _Message(op.kind, op.stage, op.microbatch, op.slice)
