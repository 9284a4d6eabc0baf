"""Execution of a no-flush schedule on a pipeline rank, segment by segment.

A segment is the program of one update window. At the cut between two segments, forwards and
messages stay in flight. They are renumbered relative to the next window, so that one program, bound
once, serves all windows of the steady state. A pause, for example for validation, receives the
messages in flight and lets other programs use stages and channels.
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
from megapipe.schedule.async_schedules.programs import InFlightMessage, ProgramSegment
from megapipe.schedule.ir import Kind, Op, Read
from megapipe.schedule.program import Action, ActionKind
from megapipe.watch.journal import Journal


class VersionedWeights(Protocol):
    """Weight versions of the stages on this process."""

    def point_at(self, stage: int, read: Read) -> None:
        """Let the next operation of `stage` use the weights `read`. Their version is counted
        relative to the operation's segment."""

    def version(self, read: Read) -> int:
        """Return the version number of the weights `read`, counted from the initial weights."""

    def ready(self, stage: int, windows_before: int, rank: int) -> bool:
        """Record that `rank` has finished the update window `windows_before` windows before the
        current one. Return whether all local pipeline ranks with the stage have finished it."""

    def update(self, stage: int, windows_before: int) -> None:
        """Update `stage` with gradients of the window `windows_before` windows before this one."""


class _Kept(NamedTuple):
    """State of the stages and channels that a pause has set aside."""

    stages: dict[int, InFlight]
    acknowledgements: dict[int, int]
    """Number of messages that each peer has still to acknowledge."""


class AsyncRunner:
    """Runs the segments of a no-flush schedule on one pipeline rank, with `stages` and `channels`.

    An update window has `window` micro-batches; `shape` returns the shapes of messages. With
    `agree` a message's name includes the weight version that its producer read, and its consumer
    must read the same version. A recorded segment reports to `recorder` when each operation runs; a
    named segment wraps every action's call with `name`. `counted`: stages whose work items in
    flight this rank renumbers; of several local ranks with a stage, only one does.
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
        """Messages that are needed in a later segment and that a channel expects already."""
        self._segments: dict[tuple[int, bool, bool], tuple[ProgramSegment, SegmentExecutor]] = {}
        """Bound segments, by the segment's identity and whether it is recorded and named."""
        self._kept: _Kept | None = None

    def begin(self) -> None:
        """Start a run with nothing in flight."""
        assert not self.announced, "messages are in flight"
        self.inbox.clear()
        self._kept = None
        for stage in self.stages.values():
            stage.begin(train=True)

    def segment(self, part: ProgramSegment, *, record: bool, name: bool) -> SegmentExecutor:
        """Return the program of a segment, bound to this rank."""
        key = id(part), record, name
        if key not in self._segments:
            self._segments[key] = part, SegmentExecutor(part, self, record=record, name=name)
        return self._segments[key][1]

    def cut(self) -> None:
        """Renumber everything in flight relative to the next window."""
        alive = {self._from_next(message): value for message, value in self.inbox.items()}
        self.inbox.clear()
        self.inbox.update(alive)
        self.announced = set(map(self._from_next, self.announced))
        for stage in self._counted.values():
            stage.restore_in_flight(stage.suspend_in_flight(), back=self.window)

    def pause(self, in_flight: Sequence[InFlightMessage]) -> None:
        """Let other programs use stages and channels until :meth:`resume`. Collective; call it
        between two segments. `in_flight`: the messages to this rank that are in flight."""
        for each in in_flight:
            peer, message, _ = each
            if message in self.inbox:  # received in an earlier pause
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
        """Continue after a pause, if there was one."""
        if self._kept is None:
            return
        for number, kept in self._kept.stages.items():
            self.stages[number].begin(train=True)
            self.stages[number].restore_in_flight(kept)
        for peer, messages in self._kept.acknowledgements.items():
            self.channels.outgoing[peer].restore(messages)
        self._kept = None

    def announce(self, peer: int, messages: Sequence[tuple[Op, Any, Read]]) -> None:
        """Let the channel from `peer` expect messages. Each has its name, its shape, and the
        weights that the receiving operation reads."""
        names = [(self.on_wire(message, read), shape) for message, shape, read in messages]
        self.channels.incoming[peer].expect(names)

    def from_before(self, each: InFlightMessage, windows: int) -> InFlightMessage:
        """Renumber an in-flight message relative to the window `windows` windows earlier."""
        number, version = each.message.microbatch, each.read.version
        return InFlightMessage(
            each.peer,
            each.message._replace(microbatch=number + windows * self.window),
            each.read._replace(version=version + windows),
        )

    def _from_next(self, message: Op) -> Op:
        return message._replace(microbatch=message.microbatch - self.window)

    def on_wire(self, message: Op, read: Read) -> Name:
        """Return the name of a message for the channel. It is the same at both ends, even if these
        count from different windows. `read`: weights that the operations at both ends read."""
        name = message._replace(microbatch=message.microbatch % self.window)
        return VersionedMessage(*name[:4], self.weights.version(read)) if self.agree else name


class SegmentExecutor(Executor):
    """Runs the segment `part`; its runner `flow` holds the messages and work items in flight."""

    def __init__(
        self, part: ProgramSegment, flow: AsyncRunner, *, record: bool, name: bool
    ) -> None:
        self._flow = flow
        self._in_flight = [flow.from_before(each, part.windows) for each in part.in_flight]
        """Messages that are received after the segment's end, numbered relative to this segment."""
        self._reads = dict(zip(part.program.actions, part.reads, strict=True))
        self._taken = {
            message_of(action): read
            for action, read in self._reads.items()
            if action.do == ActionKind.RECV
        }
        """Weights that the consumer of each received message reads."""
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
        """Start the segment, with earlier work items still in flight."""
        self._microbatches = microbatches
        self._next = 0
        known = self._flow.announced.union(self._inbox)
        self._all_come = self._inbox.keys().isdisjoint(self._taken)
        for peer, expected in self._expected.items():
            coming = [(m, shape, self._taken[m]) for m, shape in expected if m not in known]
            self._flow.announce(peer, coming)
        for peer, message, read in self._in_flight:
            if message not in known:
                self._flow.announce(peer, [(message, self._flow.shape(message), read)])
                self._flow.announced.add(message)
        self._flow.announced.difference_update(self._taken)

    def run_all(self) -> None:
        """Run the entered segment. Post no receive ahead if a pause received messages for it."""
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
        """Return the peers whose next receive is posted before an action, by the action's index.
        Receives of messages that are sent in this segment and needed after it are included."""
        found = super()._posts(stop)
        if self._flow.receive_ahead is not None:
            return found
        for peer in {each.peer for each in self._in_flight}:
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
    """Run one segment of `parts` on each pipeline rank of this process, by its runner in
    `flows`."""
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
