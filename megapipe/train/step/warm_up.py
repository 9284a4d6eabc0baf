"""Warm-up of a process's operations: each runs once before the first message is in flight.

The first call of a kernel may load it, make a plan for its shapes, or allocate memory. On a GPU
each of these may wait for everything that runs, including a message that waits for its peer. If two
ranks wait for each other this way, they hang. So before its first step each stage computes alone,
with zeros instead of its neighbours' messages. It runs its operations in order until each kind has
run in each shape. Then it runs further forwards until as many are in flight as in a step, so that
memory for them is allocated too, pinned memory included. Afterwards nothing is left except free
memory. Gradients are reduced as in a step. Updates need no warm-up, as no message is in flight when
they run. A validation before the first step has no warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from megapipe.engine.packed import PackedTensor
from megapipe.engine.stage import Key, Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import TORCH_DTYPES
from megapipe.model.interface import Message
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.train.step.machine import Machine


class WarmUp:
    """Runs the operations that this process has in `schedule`.

    Weights are gathered stage by stage, so all processes that hold a stage must take part.
    """

    def __init__(self, machine: Machine, schedule: Schedule) -> None:
        self._machine = machine
        self._schedule = schedule
        self._shape = machine.messages.of_schedule(schedule)

    def run(self, microbatches: Mapping[Key, MicroBatch]) -> None:
        """Run the operations on a step's micro-batches, or on those of a validation."""
        optimizer, train = self._machine.optimizer, not self._schedule.forward_only
        operations = self._schedule.rank_ops(self._machine.mesh.pp.index)
        optimizer.zero_grad()
        for number, stage in sorted(self._machine.stages.items()):
            optimizer.unshard(number)
            optimizer.wait_weights(number)
            if train:
                optimizer.alloc_grads(number)
            stage.begin(train=train)
            for op in warm_up_of([op for op in operations if op.stage == number], self._schedule):
                self._run(stage, op, microbatches[op.microbatch, op.slice])
            if train:
                optimizer.reduce(number)
            optimizer.reshard(number)
        if train:
            optimizer.finish_reduce()
            optimizer.zero_grad()
        for stage in self._machine.stages.values():
            stage.begin(train=train)

    def _run(self, stage: Stage, op: Op, microbatch: MicroBatch) -> None:
        key = op.microbatch, op.slice
        if op.kind == Kind.F:
            run = stage.evaluate if self._schedule.forward_only else stage.forward
            before = op._replace(stage=op.stage - 1)
            run(key, None if stage.is_first else self._zeros(before), microbatch)
        elif op.kind == Kind.R:
            stage.recompute(key)
        elif op.kind == Kind.W:
            stage.weight_grad(key)
        else:
            back = stage.backward if op.kind == Kind.B else stage.input_grad
            after = op._replace(kind=Kind.I, stage=op.stage + 1)
            back(key, None if stage.is_last else self._zeros(after))

    def _zeros(self, source: Op) -> Message:
        """Make the message that `source` would send, filled with zeros."""
        expected, device = self._shape(source), self._machine.mesh.device
        if not self._machine.layout.sends_tuples:
            dtype = TORCH_DTYPES[self._machine.config.model.dtype]
            return torch.zeros(expected, dtype=dtype, device=device)
        parts: Sequence[PackedTensor] = expected
        tensors = tuple(torch.zeros(x.shape, dtype=x.dtype, device=device) for x in parts)
        return tensors if len(tensors) > 1 else tensors[0]


def warm_up_of(operations: Sequence[Op], schedule: Schedule) -> Iterator[Op]:
    """Yield a stage's operations until each kind has run in each shape; then forwards, until as
    many micro-batches are in flight as at the peak."""
    stop, seen, most = 0, set(), 0
    held: dict[Key, None] = {}
    for index, op in enumerate(operations):
        each = op.kind, schedule.size_of(op.microbatch), op.slice
        if each not in seen:
            seen.add(each)
            stop = index + 1
        _hold(held, op)
        most = max(most, len(held))
    held.clear()
    for op in operations[:stop]:
        _hold(held, op)
        yield op
    for op in operations:
        if op.kind == Kind.F and (op.microbatch, op.slice) not in held and len(held) < most:
            _hold(held, op)
            yield op


def _hold(held: dict[Key, None], op: Op) -> None:
    """Add an operation's micro-batch to those in flight, or remove it."""
    if op.kind == Kind.F:
        held[op.microbatch, op.slice] = None
    elif op.kind in (Kind.B, Kind.W):
        del held[op.microbatch, op.slice]
