"""A pipeline rank that never flushes: programs from cut to cut, and what is alive between them.

At a cut forwards are in flight, and messages under way. Both are kept and counted from the next
window on, so that one program, bound once, runs for all windows of the steady state. A pause, as
for a validation, receives the messages that are under way, and lets other programs use stages and
channels in between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from megapipe.engine.channels import (
    Channels,
    Message,
    MessageShape,
    Name,
    VersionedMessage,
    message_of,
)
from megapipe.engine.executor import Call, Executor, take_turns
from megapipe.engine.recorder import Recorder
from megapipe.engine.stage import InFlight, Key, Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.schedule.ir import Kind, Op, Read
from megapipe.schedule.program import Action, ActionKind
from megapipe.schedule.streams.programs import InFlightMessage, ProgramSegment
from megapipe.watch.journal import Journal


class VersionedWeights(Protocol):
    """The versions of the weights of the stages here."""

    def point_at(self, stage: int, read: Read) -> None:
        """The next operation of a stage reads these weights, counted as a part counts them."""

    def version(self, read: Read) -> int:
        """The version of these weights, counted from the first of all."""

    def ready(self, stage: int, windows_before: int, rank: int) -> bool:
        """A rank is through with the window so many before the part's; whether all ranks of this
        process that have the stage are."""

    def update(self, stage: int, windows_before: int) -> None:
        """A stage has the gradients of the window so many before the part's: update it."""


class _Kept(NamedTuple):
    """Things that a pause has put aside."""

    stages: dict[int, InFlight]
    acknowledgements: dict[int, int]
    """By peer, those that are to come."""


class AsyncRunner:
    """Runs the parts of a stream on one pipeline rank, whose `stages` and `channels` are given.

    Windows have `window` micro-batches; `shape` gives the shapes of messages. With `agree` messages
    are named with the version that the operation which made them has read, and that which takes
    them has to read as well. A part that is recorded tells `recorder` when each operation runs;
    one that is named has `name` around every action's call.
    `counted` are the stages whose pieces in flight are this rank's to count: of one that several
    ranks of the process have, one of them does.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        channels: Channels,
        weights: VersionedWeights,
        *,
        counted: Mapping[int, Stage],
        window: int,
        shape: MessageShape,
        agree: bool,
        recorder: Recorder,
        name: Callable[[Action, Call], Call],
        receive_ahead: int | None,
        journal: Journal,
    ) -> None:
        self.stages = stages
        self._counted = counted
        self.channels = channels
        self.weights = weights
        self.window = window
        self.shape = shape
        self.agree = agree
        self.recorder = recorder
        self.name = name
        self.receive_ahead = receive_ahead
        self.journal = journal
        self.inbox: dict[Op, Message] = {}
        self.announced: set[Op] = set()
        """Messages that a channel expects for a part to come."""
        self._segments: dict[tuple[int, bool, bool], tuple[ProgramSegment, SegmentExecutor]] = {}
        """By the identity of their part, and whether they are recorded and named."""
        self._kept: _Kept | None = None

    def begin(self) -> None:
        """Begin anew, with nothing in flight."""
        assert not self.announced, "messages are under way"
        self.inbox.clear()
        self._kept = None
        for stage in self.stages.values():
            stage.begin(train=True)

    def segment(self, part: ProgramSegment, *, record: bool, name: bool) -> SegmentExecutor:
        """The program of a part, bound to this rank."""
        key = id(part), record, name
        if key not in self._segments:
            self._segments[key] = part, SegmentExecutor(part, self, record=record, name=name)
        return self._segments[key][1]

    def cut(self) -> None:
        """Count what is alive from the next window on."""
        alive = {self._from_next(message): value for message, value in self.inbox.items()}
        self.inbox.clear()
        self.inbox.update(alive)
        self.announced = set(map(self._from_next, self.announced))
        for stage in self._counted.values():
            stage.restore_in_flight(stage.suspend_in_flight(), back=self.window)

    def pause(self, under_way: Sequence[InFlightMessage]) -> None:
        """Let others use stages and channels until :meth:`resume`. All ranks pause at one cut."""
        for each in under_way:
            peer, message, _ = each
            if message in self.inbox:  # it came at an earlier pause
                continue
            if message not in self.announced:
                read = self.from_before(each, 1).read
                self.announce(peer, [(message, self.shape(message), read)])
            self.announced.discard(message)
            self.inbox[message] = self.channels.incoming[peer].receive()
        self._kept = _Kept(
            {number: stage.suspend_in_flight() for number, stage in self._counted.items()},
            {peer: channel.suspend() for peer, channel in self.channels.outgoing.items()},
        )

    def resume(self) -> None:
        """Go on where a pause was made, if there was one."""
        if self._kept is None:
            return
        for number, kept in self._kept.stages.items():
            self.stages[number].begin(train=True)
            self.stages[number].restore_in_flight(kept)
        for peer, messages in self._kept.acknowledgements.items():
            self.channels.outgoing[peer].restore(messages)
        self._kept = None

    def announce(self, peer: int, messages: Sequence[tuple[Op, Any, Read]]) -> None:
        """Let a channel expect messages, which have shapes and are for operations with reads."""
        names = [(self.on_wire(message, read), shape) for message, shape, read in messages]
        self.channels.incoming[peer].expect(names)

    def from_before(self, each: InFlightMessage, windows: int) -> InFlightMessage:
        """A message that is under way, counted from so many windows before."""
        number, version = each.message.microbatch, each.read.version
        return InFlightMessage(
            each.peer,
            each.message._replace(microbatch=number + windows * self.window),
            each.read._replace(version=version + windows),
        )

    def _from_next(self, message: Op) -> Op:
        return message._replace(microbatch=message.microbatch - self.window)

    def on_wire(self, message: Op, read: Read) -> Name:
        """The name of a message on its way, between operations that read these weights: its ends
        may count it from different windows."""
        name = message._replace(microbatch=message.microbatch % self.window)
        return VersionedMessage(*name[:4], self.weights.version(read)) if self.agree else name


class SegmentExecutor(Executor):
    """Runs a part of a stream; messages and pieces in flight are those of its `flow`."""

    def __init__(
        self, part: ProgramSegment, flow: AsyncRunner, *, record: bool, name: bool
    ) -> None:
        self._flow = flow
        self._under_way = [flow.from_before(each, part.windows) for each in part.under_way]
        """Messages that come behind the end, counted as those of this part."""
        self._reads = dict(zip(part.program.actions, part.reads, strict=True))
        self._taken = {
            message_of(action): read
            for action, read in self._reads.items()
            if action.do == ActionKind.RECV
        }
        """By message, what the operation reads that it is for."""
        super().__init__(
            part.program,
            flow.stages,
            flow.channels,
            shape=flow.shape,
            train=True,
            recorder=flow.recorder if record else None,
            wrap=flow.name if name else None,
            receive_ahead=flow.receive_ahead,
            journal=flow.journal,
            inbox=flow.inbox,
        )

    def enter(self, microbatches: Mapping[Key, MicroBatch]) -> None:
        """Begin the part, beside what is in flight."""
        self._microbatches = microbatches
        self._next = 0
        known = self._flow.announced.union(self._inbox)
        self._all_come = self._inbox.keys().isdisjoint(self._taken)
        for peer, expected in self._expected.items():
            coming = [(m, shape, self._taken[m]) for m, shape in expected if m not in known]
            self._flow.announce(peer, coming)
        for peer, message, read in self._under_way:
            if message not in known:
                self._flow.announce(peer, [(message, self._flow.shape(message), read)])
                self._flow.announced.add(message)
        self._flow.announced.difference_update(self._taken)

    def run_all(self) -> None:
        """Run the part that was entered. No receive is posted ahead where a pause has received some
        of the messages."""
        self._run_all(self._parts[self._stepped and self._all_come][1])
        self._stepped = True

    def ready(self) -> bool:
        action = self.program.actions[self._next]
        if action.kind == Kind.U:
            return self._flow.weights.ready(action.stage, action.microbatch, self.program.rank)
        return super().ready() or (
            action.do == ActionKind.RECV and message_of(action) in self._inbox
        )

    def _posts(self, stop: int) -> dict[int, list[int]]:
        """Where receives are posted as early as can be, also those of messages that are sent before
        the end and needed behind it."""
        found = super()._posts(stop)
        if self._flow.receive_ahead is not None:
            return found
        for peer in {each.peer for each in self._under_way}:
            last = -1
            for index, action in enumerate(self.program.actions):
                if action.do == ActionKind.RECV and action.peer == peer:
                    last = index
            found[last + 1] = [*found.get(last + 1, ()), peer]
        return found

    def _bind(self, action: Action) -> Call:
        if action.kind == Kind.U:
            update = partial(self._flow.weights.update, action.stage, action.microbatch)
            return update if self.recorder is None else self.recorder.timed(action, update)
        call = super()._bind(action)
        if action.do != ActionKind.COMPUTE:
            return call
        use = partial(self._flow.weights.point_at, action.stage, self._reads[action])

        def use_and_call() -> None:
            use()
            call()

        return use_and_call

    def _bind_send(self, action: Action) -> Call:
        message, read, take = message_of(action), self._reads[action], self._inbox.pop
        send, on_wire = self.channels.outgoing[action.peer].send, self._flow.on_wire
        return lambda: send(on_wire(message, read), take(message))

    def _bind_receive(self, action: Action) -> Call:
        receive, message, inbox = super()._bind_receive(action), message_of(action), self._inbox
        acknowledge = self.channels.outgoing[action.peer].acknowledge if action.acks else None

        def receive_unless_here() -> None:
            if message not in inbox:
                receive()
            elif acknowledge is not None:
                acknowledge(action.acks)

        return receive_unless_here


def run_parts(
    flows: Sequence[AsyncRunner],
    parts: Sequence[ProgramSegment],
    microbatches: Mapping[Key, MicroBatch],
    *,
    record: bool = False,
    name: bool = False,
) -> None:
    """Run a part on each pipeline rank of this process."""
    segments = [
        flow.segment(part, record=record, name=name)
        for flow, part in zip(flows, parts, strict=True)
    ]
    for segment in segments:
        segment.enter(microbatches)
    if len(segments) == 1:
        segments[0].run_all()
    else:
        take_turns(segments)
