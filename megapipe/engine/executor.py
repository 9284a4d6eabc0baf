"""The loop over ops: runs one pipeline rank's lowered program.

The constructor turns each action into a call, bound to the stage or channel that the action works
on. A step runs these calls one after the other. Outputs and gradients wait in an inbox, keyed by
the op that produced them, until the op that needs them runs; neighbouring stages on one rank need
no message. An executor can run action by action, so one process can run all ranks' programs in
turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch.nn import Parameter

from megapipe.engine.channels import Channels, Message, MessageShape, message_of
from megapipe.engine.profiler_names import name_of
from megapipe.engine.recorder import Recorder
from megapipe.engine.recv_prefetch import posts
from megapipe.engine.stage import Key, Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.schedule.data_parallel import last_gradients
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.program import Action, ActionKind, Program
from megapipe.watch.journal import Journal, text

Call = Callable[[], None]
Noted = tuple[bytes, bool, Call]
"""An action: its name for the journal, whether it computes an operation, and its call."""


class DataParallelHooks(Protocol):
    """Collectives of data-parallel replicas, by stage; they run beside other work."""

    def reduce(self, stage: int) -> None:
        """REDUCE: start to reduce the stage's gradients. No operation adds to them meanwhile."""

    def gradient_ready(
        self, stage: int, parameter: Parameter, waiting: Iterable[Parameter]
    ) -> None:
        """Record that the gradient of `parameter` is complete; gradients of `waiting` are deferred.

        Called in the last operation before a REDUCE, so that reductions of buckets can start early.
        """

    def alloc_grads(self, stage: int) -> None:
        """ALLOC_GRADS: allocate memory for the stage's next weight gradients."""

    def unshard(self, stage: int) -> None:
        """UNSHARD: start the all-gather of the stage's weights."""

    def wait_weights(self, stage: int) -> None:
        """WAIT_WEIGHTS: wait for the all-gather of the stage's weights."""

    def reshard(self, stage: int) -> None:
        """RESHARD: free the stage's gathered weights until the next UNSHARD."""


class Speculation(NamedTuple):
    """Prefix of a rank's program that can be undone (:mod:`megapipe.schedule.speculation`)."""

    actions: int
    arriving: Counter[int]
    """Number of messages that the prefix of each other rank sends to this rank."""


class Executor:
    """Runs `program` with this rank's `stages` (by global stage number) over its `channels`.

    `shape` returns the shape of each message. With `train` false the forward ops build no graph
    (validation). A `recorder` is notified when each op starts and stops. `wrap` wraps the call of
    every action. Each action is noted in the `journal` as it starts. `synchroniser` is needed if
    the program has data-parallel actions.

    From the second step on, receives are posted `receive_ahead` operations before need, by default
    as early as possible. The first step posts none ahead: it loads kernels and allocates memory,
    which on a GPU can wait for all running work, so also for a posted receive.

    `inbox` maps ops to their outputs that no op has consumed yet. A no-flush schedule passes it on
    from program to program.
    """

    def __init__(
        self,
        program: Program,
        stages: Mapping[int, Stage],
        channels: Channels,
        *,
        shape: MessageShape,
        train: bool,
        recorder: Recorder | None = None,
        wrap: Callable[[Action, Call], Call] | None = None,
        synchroniser: DataParallelHooks | None = None,
        receive_ahead: int | None = None,
        journal: Journal | None = None,
        inbox: dict[Op, Message] | None = None,
    ) -> None:
        self.program = program
        self.stages = stages
        self.channels = channels
        self.journal = journal or Journal()
        self.train = train
        self.recorder = recorder
        self.synchroniser = synchroniser
        self._inbox: dict[Op, Message] = {} if inbox is None else inbox
        self._microbatches: Mapping[Key, MicroBatch] = {}
        self._expected: dict[int, list[tuple[Op, Any]]] = defaultdict(list)
        for action in program.actions:
            if action.do == ActionKind.RECV:
                message = message_of(action)
                expected = message, shape(message)
                self._expected[action.peer].append(expected)
        self._calls = [self._bind(action) for action in program.actions]
        for index in last_gradients(program.actions).values():
            stage = program.actions[index].stage
            self._calls[index] = self._watched(self._calls[index], stage)
        self._notes = [
            (text(name_of(action)), action.do == ActionKind.COMPUTE and action.kind != Kind.U)
            for action in program.actions
        ]
        """Name of each action for the journal, and whether the action computes an operation."""
        if wrap is not None:
            self._calls = list(map(wrap, program.actions, self._calls))
        self._next = 0
        self._receive_ahead = receive_ahead
        self._stepped = False
        """Whether a step has been run to its end."""
        self._speculation: Speculation | None = None
        self._parts = self._cut()

    def begin(self, microbatches: Mapping[Key, MicroBatch]) -> None:
        """Start a step over this replica's micro-batches."""
        for stage in self.stages.values():
            stage.begin(train=self.train)
        self._microbatches = microbatches
        self._next = 0
        if self.recorder is not None:
            self.recorder.begin()  # waits for the device, and so for posted receives
        for peer, expected in self._expected.items():
            first = len(expected) if self._speculation is None else self._speculation.arriving[peer]
            self.channels.incoming[peer].expect(expected[:first])

    @property
    def done(self) -> bool:
        return self._next == len(self._calls)

    def ready(self) -> bool:
        """Whether the next action can run without waiting for another rank's program."""
        action = self.program.actions[self._next]
        return action.do != ActionKind.RECV or self.channels.incoming[action.peer].arrived()

    def advance(self) -> None:
        """Run the next action."""
        index = self._next
        self._next += 1
        self._run_all([(*self._notes[index], self._calls[index])])

    def finish(self) -> None:
        """End the step: check that every message was delivered and consumed."""
        for channel in self.channels.outgoing.values():
            channel.finish()
        assert not self._inbox, f"never consumed: {sorted(self._inbox)}"

    def run(self, microbatches: Mapping[Key, MicroBatch]) -> None:
        """Run a whole step."""
        self.begin(microbatches)
        self._run(0, 1)
        self.finish()
        self._stepped = True

    def set_speculation(self, speculation: Speculation) -> None:
        """Let steps start with :meth:`run_prefix` from now on, with the prefix `speculation`."""
        self._speculation = speculation
        self._parts = self._cut()

    def run_prefix(self, microbatches: Mapping[Key, MicroBatch]) -> None:
        """Run the prefix that can be undone; then call :meth:`resume` or :meth:`abort`."""
        assert self._speculation is not None
        self.begin(microbatches)
        self._run(0)

    def resume(self) -> None:
        """Run the rest of the step after the prefix."""
        assert self._speculation is not None
        for peer, expected in self._expected.items():
            self.channels.incoming[peer].expect(expected[self._speculation.arriving[peer] :])
        self._run(1)
        self.finish()
        self._stepped = True

    def abort(self) -> None:
        """Undo the prefix: receive and drop its messages. Collective over pipeline ranks."""
        assert self._speculation is not None
        taken = Counter(
            action.peer
            for action in self.program.actions[: self._speculation.actions]
            if action.do == ActionKind.RECV
        )
        for peer, channel in self.channels.incoming.items():
            for _ in range(self._speculation.arriving[peer] - taken[peer]):
                channel.receive()
        self._inbox.clear()
        self.finish()

    def _run(self, *parts: int) -> None:
        """Run the prefix that can be undone (0), the rest of the step (1), or both."""
        for part in parts:
            self._run_all(self._parts[self._stepped][part])

    def _run_all(self, noted: Sequence[Noted]) -> None:
        """Run the calls, with no Python call between them unless compute times are measured."""
        note, own_time = self.journal.note, self.journal.own_time
        if not own_time.on:
            for name, _, call in noted:
                note[:] = name
                call()
            return
        for name, computes, call in noted:
            note[:] = name
            if computes:
                own_time.operation(call)
            else:
                call()

    def _cut(self) -> tuple[tuple[list[Noted], list[Noted]], tuple[list[Noted], list[Noted]]]:
        """Return the calls twice as (prefix, rest): without and with receives posted ahead."""
        stop = 0 if self._speculation is None else self._speculation.actions
        posted = self._posts(stop)
        plain = [(*note, call) for note, call in zip(self._notes, self._calls, strict=True)]
        ahead: tuple[list[Noted], list[Noted]] = [], []
        for index, (name, _, _) in enumerate(plain):
            own = ahead[index >= stop]
            for peer in posted.get(index, ()):
                own.append((name, False, self.channels.incoming[peer].post))
            own.append(plain[index])
        return (plain[:stop], plain[stop:]), ahead

    def _posts(self, stop: int) -> dict[int, list[int]]:
        """Return the peers whose next receive is posted before an action, by the action's index."""
        return posts(self.program.actions, self._receive_ahead, stop)

    def _bind(self, action: Action) -> Call:
        if action.do == ActionKind.SEND:
            return self._bind_send(action)
        if action.do == ActionKind.RECV:
            return self._bind_receive(action)
        if action.do != ActionKind.COMPUTE:
            return self._bind_synchronisation(action)
        call = {
            Kind.F: self._bind_forward,
            Kind.I: self._bind_backward,
            Kind.B: self._bind_backward,
            Kind.W: self._bind_weight_grad,
            Kind.R: self._bind_recompute,
        }[action.kind](action)
        return call if self.recorder is None else self.recorder.timed(action, call)

    def _watched(self, call: Call, stage: int) -> Call:
        """Wrap `call` so that the synchroniser is notified of each weight gradient."""
        assert self.synchroniser is not None
        queue, watch = self.stages[stage].queue, partial(self.synchroniser.gradient_ready, stage)

        def run() -> None:
            queue.watch = watch
            call()
            queue.watch = None

        return run

    def _bind_send(self, action: Action) -> Call:
        message, take = message_of(action), self._inbox.pop
        send = self.channels.outgoing[action.peer].send

        def call() -> None:
            tensor = take(message)
            assert tensor is not None
            send(message, tensor)

        return call

    def _bind_receive(self, action: Action) -> Call:
        message, inbox, acks = message_of(action), self._inbox, action.acks
        receive = self.channels.incoming[action.peer].receive

        def call() -> None:
            inbox[message] = receive()

        if not acks:
            return call
        acknowledge = self.channels.outgoing[action.peer].acknowledge

        def call_and_acknowledge() -> None:
            inbox[message] = receive()
            acknowledge(acks)

        return call_and_acknowledge

    def _bind_synchronisation(self, action: Action) -> Call:
        assert self.synchroniser is not None
        together, stage = self.synchroniser, action.stage
        run = {
            ActionKind.REDUCE: together.reduce,
            ActionKind.ALLOC_GRADS: together.alloc_grads,
            ActionKind.UNSHARD: together.unshard,
            ActionKind.WAIT_WEIGHTS: together.wait_weights,
            ActionKind.RESHARD: together.reshard,
        }[action.do]
        return lambda: run(stage)

    def _bind_forward(self, action: Action) -> Call:
        stage, key, inbox = self.stages[action.stage], _key(action), self._inbox
        run = stage.forward if self.train else stage.evaluate
        own = message_of(action)
        source = None if stage.is_first else own._replace(stage=own.stage - 1)

        def call() -> None:
            x = None if source is None else inbox.pop(source)
            y = run(key, x, self._microbatches[key])
            if y is not None:
                inbox[own] = y

        return call

    def _bind_backward(self, action: Action) -> Call:
        stage, key, inbox = self.stages[action.stage], _key(action), self._inbox
        run = stage.backward if action.kind == Kind.B else stage.input_grad
        own = message_of(action)._replace(kind=Kind.I)
        source = None if stage.is_last else own._replace(stage=own.stage + 1)

        def call() -> None:
            grad = run(key, None if source is None else inbox.pop(source))
            if grad is not None:
                inbox[own] = grad

        return call

    def _bind_weight_grad(self, action: Action) -> Call:
        run, key = self.stages[action.stage].weight_grad, _key(action)
        return lambda: run(key)

    def _bind_recompute(self, action: Action) -> Call:
        run, key = self.stages[action.stage].recompute, _key(action)
        return lambda: run(key)


def _key(action: Action) -> Key:
    return action.microbatch, action.slice


def run_together(executors: Sequence[Executor], microbatches: Mapping[Key, MicroBatch]) -> None:
    """Run a whole step of all pipeline ranks in one process.

    Each rank in turn runs until it must wait. This order depends only on the programs, so tensor-
    and data-parallel peers in other processes follow the same order.
    """
    for executor in executors:
        executor.begin(microbatches)
    take_turns(executors)
    for executor in executors:
        executor.finish()


def take_turns(executors: Sequence[Executor]) -> None:
    """Run the rest of all pipeline ranks' programs in one process, each until it waits."""
    while not all(executor.done for executor in executors):
        progress = False
        for executor in executors:
            while not executor.done and executor.ready():
                executor.advance()
                progress = True
        assert progress, "the programs wait for each other"
