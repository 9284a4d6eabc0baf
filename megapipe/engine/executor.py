"""The loop over ops: runs one pipeline rank's lowered program.

Outputs and gradients wait in an inbox, keyed by the op that produced them, until the op that
needs them runs; neighbours on the same rank find them there without a message. An executor can be
advanced op by op, so one process can also run the programs of all pipeline ranks in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from megapipe.engine.channels import Channels, message_of
from megapipe.engine.stage import Stage
from megapipe.model.microbatch import MicroBatch
from megapipe.schedule.ir import Kind, Op
from megapipe.schedule.lower import Action, Do, Program


class Executor:
    """Runs `program` with this rank's `stages` (by global stage number) over its `channels`.

    With `train` false the forward ops build no graph (validation).
    """

    def __init__(
        self, program: Program, stages: Mapping[int, Stage], channels: Channels, *, train: bool
    ) -> None:
        self.program = program
        self.stages = stages
        self.channels = channels
        self.train = train
        self._inbox: dict[Op, Tensor] = {}
        self._microbatches: Sequence[MicroBatch] = ()
        self._next = 0

    def begin(self, microbatches: Sequence[MicroBatch]) -> None:
        """Start a step over this replica's micro-batches."""
        for stage in self.stages.values():
            stage.reset()
        self._microbatches = microbatches
        self._next = 0
        self.channels.start(self.program.actions)

    @property
    def done(self) -> bool:
        return self._next == len(self.program.actions)

    def ready(self) -> bool:
        """Whether the next action can run without waiting for another program."""
        action = self.program.actions[self._next]
        return action.do != Do.RECV or self.channels.arrived(action)

    def advance(self) -> None:
        """Run the next action."""
        action = self.program.actions[self._next]
        self._next += 1
        if action.do == Do.COMPUTE:
            self._compute(action)
        elif action.do == Do.SEND:
            self.channels.send(action, self._inbox.pop(message_of(action)))
        else:
            self._inbox[message_of(action)] = self.channels.receive(action)

    def finish(self) -> None:
        """End the step: all messages delivered, nothing left over."""
        self.channels.finish()
        assert not self._inbox, f"never consumed: {sorted(self._inbox)}"

    def run(self, microbatches: Sequence[MicroBatch]) -> None:
        """A whole step."""
        self.begin(microbatches)
        while not self.done:
            self.advance()
        self.finish()

    def _compute(self, action: Action) -> None:
        kind, s, m = action.kind, action.stage, action.microbatch
        stage = self.stages[s]
        if kind == Kind.F:
            x = None if stage.is_first else self._inbox.pop(Op(Kind.F, s - 1, m, action.slice))
            forward = stage.forward if self.train else stage.evaluate
            y = forward(m, x, self._microbatches[m])
            if y is not None:
                self._inbox[Op(Kind.F, s, m, action.slice)] = y
        elif kind in (Kind.I, Kind.B):
            grad = None if stage.is_last else self._inbox.pop(Op(Kind.I, s + 1, m, action.slice))
            grad = stage.input_grad(m, grad)
            if grad is not None:
                self._inbox[Op(Kind.I, s, m, action.slice)] = grad
            if kind == Kind.B:
                stage.weight_grad(m)
        else:
            stage.weight_grad(m)


def run_together(executors: Sequence[Executor], microbatches: Sequence[MicroBatch]) -> None:
    """A whole step of all pipeline ranks in one process.

    Each rank in turn runs until it must wait: an order that depends on the programs alone, so
    tensor- and data-parallel peers, whose groups are real, follow the same one.
    """
    for executor in executors:
        executor.begin(microbatches)
    while not all(executor.done for executor in executors):
        progress = False
        for executor in executors:
            while not executor.done and executor.ready():
                executor.advance()
                progress = True
        assert progress, "the programs wait for each other"
    for executor in executors:
        executor.finish()
