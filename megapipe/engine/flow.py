"""A pipeline rank that never flushes: programs from cut to cut, and what is alive between them.

At a cut forwards are in flight, and messages under way. Both are kept and counted from the next
window on, so that one program, bound once, runs for all windows of the steady state. A pause, as
for a validation, receives the messages that are under way, and lets other programs use stages and
channels in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from megapipe.engine.channels import Channels, Message, MessageShape, message_of
from megapipe.engine.executor import Call, Executor, take_turns
from megapipe.engine.stage import InFlight, Key, Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.schedule.ir import Kind, Op, Read
from megapipe.schedule.program import Action, Do
from megapipe.schedule.streams.programs import Part, UnderWay
from megapipe.watch.journal import Journal


class Weights(Protocol):
    """The versions of the weights of the stages here."""

    def use(self, stage: int, read: Read) -> None:
        """The next operation of a stage reads these weights, counted as a part counts them."""

    def update(self, stage: int, windows_before: int) -> None:
        """A stage has the gradients of the window so many before the part's: update it."""


class _Kept(NamedTuple):
    """Things that a pause has put aside."""

    stages: dict[int, InFlight]
    acknowledgements: dict[int, int]
    """By peer, those that are to come."""


class Flow:
    """Runs the parts of a stream on one pipeline rank, whose `stages` and `channels` are given.

    Windows have `window` micro-batches; `shape` gives the shapes of messages.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        channels: Channels,
        weights: Weights,
        *,
        window: int,
        shape: MessageShape,
        receive_ahead: int | None,
        journal: Journal,
    ) -> None:
        self.stages = stages
        self.channels = channels
        self.weights = weights
        self.window = window
        self.shape = shape
        self.receive_ahead = receive_ahead
        self.journal = journal
        self.inbox: dict[Op, Message] = {}
        self._segments: dict[int, tuple[Part, Segment]] = {}
        """By the identity of their part."""
        self._kept: _Kept | None = None

    def begin(self) -> None:
        """Begin anew, with nothing in flight."""
        self.inbox.clear()
        self._kept = None
        for stage in self.stages.values():
            stage.begin(train=True)

    def segment(self, part: Part) -> Segment:
        """The program of a part, bound to this rank."""
        if id(part) not in self._segments:
            self._segments[id(part)] = part, Segment(part, self)
        return self._segments[id(part)][1]

    def cut(self) -> None:
        """Count what is alive from the next window on."""
        alive = {
            message._replace(microbatch=message.microbatch - self.window): value
            for message, value in self.inbox.items()
        }
        self.inbox.clear()
        self.inbox.update(alive)
        for stage in self.stages.values():
            stage.take_back(stage.set_aside(), back=self.window)

    def pause(self, under_way: Sequence[UnderWay]) -> None:
        """Let others use stages and channels until :meth:`go_on`. All ranks pause at one cut."""
        for peer, message in under_way:
            if message in self.inbox:  # it came at an earlier pause
                continue
            channel = self.channels.incoming[peer]
            channel.expect([(self.on_wire(message), self.shape(message))])
            self.inbox[message] = channel.receive()
        self._kept = _Kept(
            {number: stage.set_aside() for number, stage in self.stages.items()},
            {peer: channel.set_aside() for peer, channel in self.channels.outgoing.items()},
        )

    def go_on(self) -> None:
        """Go on where a pause was made, if there was one."""
        if self._kept is None:
            return
        for number, kept in self._kept.stages.items():
            self.stages[number].begin(train=True)
            self.stages[number].take_back(kept)
        for peer, messages in self._kept.acknowledgements.items():
            self.channels.outgoing[peer].take_back(messages)
        self._kept = None

    def on_wire(self, message: Op) -> Op:
        """The name of a message on its way: its ends may count it from different windows."""
        return message._replace(microbatch=message.microbatch % self.window)


class Segment(Executor):
    """Runs a part of a stream; messages and pieces in flight are those of its `flow`."""

    def __init__(self, part: Part, flow: Flow) -> None:
        self._flow = flow
        self._reads = dict(zip(part.program.actions, part.reads, strict=True))
        super().__init__(
            part.program,
            flow.stages,
            flow.channels,
            shape=flow.shape,
            train=True,
            receive_ahead=flow.receive_ahead,
            journal=flow.journal,
            inbox=flow.inbox,
        )

    def enter(self, microbatches: Mapping[Key, MicroBatch]) -> None:
        """Begin the part, beside what is in flight."""
        self._microbatches = microbatches
        self._next = 0
        self._all_come = True
        for peer, expected in self._expected.items():
            coming = [
                (self._on_wire(message), shape)
                for message, shape in expected
                if message not in self._inbox
            ]
            self._all_come &= len(coming) == len(expected)
            self.channels.incoming[peer].expect(coming)

    def run_all(self) -> None:
        """Run the part that was entered. No receive is posted ahead where a pause has received some
        of the messages."""
        for call in self._parts[self._stepped and self._all_come][1]:
            call()
        self._stepped = True

    def ready(self) -> bool:
        action = self.program.actions[self._next]
        return super().ready() or (action.do == Do.RECV and message_of(action) in self._inbox)

    def _bind(self, action: Action) -> Call:
        if action.kind == Kind.U:
            return partial(self._flow.weights.update, action.stage, action.microbatch)
        call, read = super()._bind(action), self._reads[action]
        if read is None:
            return call
        use = partial(self._flow.weights.use, action.stage, read)

        def use_and_call() -> None:
            use()
            call()

        return use_and_call

    def _on_wire(self, message: Op) -> Op:
        return self._flow.on_wire(message)

    def _bind_taking(self, action: Action) -> Call:
        take, message, inbox = super()._bind_taking(action), message_of(action), self._inbox

        def take_unless_here() -> None:
            if message not in inbox:
                take()

        return take_unless_here


def run_parts(
    flows: Sequence[Flow], parts: Sequence[Part], microbatches: Mapping[Key, MicroBatch]
) -> None:
    """Run a part on each pipeline rank of this process."""
    segments = [flow.segment(part) for flow, part in zip(flows, parts, strict=True)]
    for segment in segments:
        segment.enter(microbatches)
    if len(segments) == 1:
        segments[0].run_all()
    else:
        take_turns(segments)
