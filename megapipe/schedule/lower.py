"""From a schedule to per-rank programs with explicit messages.

There is one one-way channel per ordered pair of ranks that have something to tell each other. Its
messages are FIFO: the sender posts each directly after the operation that makes it, the receiver
takes them in that order, as late as it can, so directly before the operation that needs one it
takes that one and all before it. Why this cannot deadlock is in :mod:`megapipe.schedule.validate`.
Neighbouring stages on one rank hand over by reference, without an action.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.placement import Placement
from megapipe.schedule.validate import validate


class Do(IntEnum):
    """What an action does."""

    COMPUTE = 0
    SEND = 1
    RECV = 2


class Action(NamedTuple):
    """One step of a rank's program.

    A message is named by what it carries, alike at both ends: kind F is the output of the forward
    of (stage, microbatch), for stage+1; kind I is the input gradient of its backward (I or B), for
    stage-1.
    """

    do: Do
    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0
    peer: int = -1
    """The rank at the other end of a message."""
    acks: int = 0
    """On RECV: how many more of this rank's sends to the peer are known, now that this message is
    here, to have been received: those that the peer received before it sent this message."""


@dataclass(frozen=True)
class Program:
    """What one rank does in a step, in order."""

    rank: int
    actions: tuple[Action, ...]


class Channel(NamedTuple):
    """A one-way channel between two ranks."""

    src: int
    dst: int
    messages: int
    """Messages per step."""
    depth: int
    """The most messages received and not yet consumed at once; a message is consumed when the
    operation that needs it has ended."""


class _Message(NamedTuple):
    kind: Kind
    stage: int
    microbatch: int
    slice: int


def lower(schedule: Schedule, ranks: Iterable[int] | None = None) -> tuple[Program, ...]:
    """Programs of `ranks` (default: all), in that order.

    Only these ranks and those that send to them are looked at.

    Raises:
        ScheduleError: the schedule is not valid.
    """
    validate(schedule)
    wanted = list(range(schedule.placement.ranks) if ranks is None else ranks)
    senders = {src for src, dst in pairs(schedule.placement) if dst in wanted}
    queues = _queues(schedule, senders.union(wanted))
    steps: dict[int, list[tuple[Do, _Message, int]]] = {rank: [] for rank in wanted}
    known = {}  # (sender, message): what the sender had received from the receiver by then
    for rank in senders.union(wanted):
        received: dict[int, int] = defaultdict(int)
        for step in _steps(schedule, rank, queues):
            do, message, peer = step
            if do == Do.RECV:
                received[peer] += 1
            elif do == Do.SEND and peer in steps:
                known[rank, message] = received[peer]
            if rank in steps:
                steps[rank].append(step)
    programs = []
    for rank in wanted:
        acked: dict[int, int] = defaultdict(int)
        actions = []
        for do, message, peer in steps[rank]:
            acks = 0
            if do == Do.RECV:
                acks = known[peer, message] - acked[peer]
                acked[peer] += acks
            actions.append(Action(do, *message, peer, acks))
        programs.append(Program(rank, tuple(actions)))
    return tuple(programs)


def channels(schedule: Schedule) -> tuple[Channel, ...]:
    """The channels that a schedule uses, sorted by source and destination.

    Raises:
        ScheduleError: the schedule is not valid.
    """
    validate(schedule)
    queues = _queues(schedule, range(schedule.placement.ranks))
    depths: dict[tuple[int, int], int] = defaultdict(int)
    for rank in range(schedule.placement.ranks):
        pending: dict[int, int] = defaultdict(int)
        for do, message, peer in _steps(schedule, rank, queues):
            if do == Do.RECV:
                pending[peer] += 1
                depths[peer, rank] = max(depths[peer, rank], pending[peer])
            elif do == Do.COMPUTE:
                source = _input(Op(*message), schedule.placement)
                if source is not None:
                    pending[source[1]] -= 1
    return tuple(
        Channel(src, dst, len(queues[src, dst]), depths[src, dst]) for src, dst in sorted(queues)
    )


def pairs(placement: Placement) -> list[tuple[int, int]]:
    """The (source, destination) ranks between which training or validation sends messages."""
    used = set()
    for homes in placement.table:
        for a, b in itertools.pairwise(homes):
            if a != b:
                used |= {(a, b), (b, a)}
    return sorted(used)


def channel_rounds(used: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Rounds in which channels are created, each rank at most once per round.

    Each pair goes into the first round where both its ranks are free, the two directions of a
    pair one after the other: 4 rounds for a chain, and for a loop of an even number of ranks.
    """
    rounds: list[list[tuple[int, int]]] = []
    busy: list[set[int]] = []
    for src, dst in sorted(set(used), key=lambda pair: (min(pair), max(pair), pair)):
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
) -> Iterator[tuple[Do, _Message, int]]:
    """The actions of a rank without acknowledgements: (do, what, peer or -1)."""
    placement = schedule.placement
    place = {
        message: index
        for (_, dst), queue in queues.items()
        if dst == rank
        for index, message in enumerate(queue)
    }
    taken: dict[int, int] = defaultdict(int)
    for op in schedule.rank_ops(rank):
        source = _input(op, placement)
        if source is not None:
            message, peer = source
            for index in range(taken[peer], place[message] + 1):
                yield Do.RECV, queues[peer, rank][index], peer
            taken[peer] = max(taken[peer], place[message] + 1)
        yield Do.COMPUTE, _Message(*op), -1
        target = _output(op, placement)
        if target is not None:
            yield Do.SEND, *target


def _queues(schedule: Schedule, into: Collection[int]) -> dict[tuple[int, int], list[_Message]]:
    """The messages of every channel into these ranks, in the order in which they are sent."""
    queues: dict[tuple[int, int], list[_Message]] = defaultdict(list)
    for rank in {src for src, dst in pairs(schedule.placement) if dst in into}:
        for op in schedule.rank_ops(rank):
            target = _output(op, schedule.placement)
            if target is not None and target[1] in into:
                queues[rank, target[1]].append(target[0])
    return dict(queues)


def _input(op: Op, placement: Placement) -> tuple[_Message, int] | None:
    """The message that an operation needs and the rank it comes from, if another."""
    if op.kind == Kind.F:
        kind, stage = Kind.F, op.stage - 1
    elif op.kind in (Kind.B, Kind.I):
        kind, stage = Kind.I, op.stage + 1
    else:
        return None
    return _crossing(kind, stage, op, placement, stage)


def _output(op: Op, placement: Placement) -> tuple[_Message, int] | None:
    """The message that an operation makes and the rank it goes to, if another."""
    if op.kind == Kind.F:
        kind, other = Kind.F, op.stage + 1
    elif op.kind in (Kind.B, Kind.I):
        kind, other = Kind.I, op.stage - 1
    else:
        return None
    return _crossing(kind, op.stage, op, placement, other)


def _crossing(
    kind: Kind, producer: int, op: Op, placement: Placement, other: int
) -> tuple[_Message, int] | None:
    if not 0 <= other < placement.stages:
        return None
    peer = placement.rank_of(other)
    if peer == placement.rank_of(op.stage):
        return None
    return _Message(kind, producer, op.microbatch, op.slice), peer
