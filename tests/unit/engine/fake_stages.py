"""Stages that note what they are asked to do and pass on numbers that say where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megapipe.engine.channels import InProcessChannels
from megapipe.engine.executor import Executor
from megapipe.schedule.ir import Kind, Op, Schedule
from megapipe.schedule.lower import lower

Key = tuple[int, int]


class FakeStage:
    """A stage that passes on what it gets, plus one; a log has a line such as ``2F1.1=23`` for each
    op. A forward starts from the micro-batch itself, a number; a backward from 100 x micro-batch +
    10 x slice."""

    def __init__(self, stage: int, stages: int, log: list[str]) -> None:
        self.stage, self.log = stage, log
        self.is_first, self.is_last = stage == 0, stage == stages - 1

    def begin(self, *, train: bool) -> None:
        self.log.append(f"{self.stage} begins to {'train' if train else 'evaluate'}")

    def forward(self, key: Key, x: torch.Tensor | None, mb: Any) -> torch.Tensor | None:
        return self._run("F", key, x, mb, begins=self.is_first, ends=self.is_last)

    def evaluate(self, key: Key, x: torch.Tensor | None, mb: Any) -> torch.Tensor | None:
        return self._run("E", key, x, mb, begins=self.is_first, ends=self.is_last)

    def recompute(self, key: Key) -> None:
        self.log.append(name(self.stage, "R", key))

    def input_grad(self, key: Key, grad: torch.Tensor | None) -> torch.Tensor | None:
        start = 100.0 * key[0] + 10.0 * key[1]
        return self._run("I", key, grad, start, begins=self.is_last, ends=self.is_first)

    def backward(self, key: Key, grad: torch.Tensor | None) -> torch.Tensor | None:
        result = self.input_grad(key, grad)
        self.weight_grad(key)
        return result

    def weight_grad(self, key: Key) -> None:
        self.log.append(name(self.stage, "W", key))

    def _run(
        self, kind: str, key: Key, x: torch.Tensor | None, start: float, *, begins: bool, ends: bool
    ) -> torch.Tensor | None:
        assert (x is None) == begins
        value = start if x is None else x.item()
        self.log.append(f"{name(self.stage, kind, key)}={value:g}")
        return None if ends else torch.tensor(value + 1, dtype=torch.float64)


def name(stage: int, kind: str, key: Key) -> str:
    """Return the name of an operation, as an op is written."""
    return f"{stage}{kind}{key[0]}" + (f".{key[1]}" if key[1] else "")


def microbatches_of(schedule: Schedule) -> Any:
    """Return numbers for micro-batches: 1000 x (micro-batch + 1) + 100 x slice."""
    return {
        (microbatch, part): 1000.0 * (microbatch + 1) + 100.0 * part
        for microbatch in range(schedule.microbatches)
        for part in range(schedule.slices)
    }


def lines(schedule: Schedule, rank: int) -> list[str]:
    """Return the log that a rank must have: its ops in order, each with what it depends on."""
    result = []
    last = schedule.placement.stages - 1
    for op in schedule.rank_ops(rank):
        key = op.microbatch, op.slice
        if op.kind == Kind.F:
            start = 1000 * (op.microbatch + 1) + 100 * op.slice
            result.append(f"{name(op.stage, 'F', key)}={start + op.stage}")
        if op.kind in (Kind.I, Kind.B):
            start = 100 * op.microbatch + 10 * op.slice
            result.append(f"{name(op.stage, 'I', key)}={start + last - op.stage}")
        if op.kind in (Kind.W, Kind.B):
            result.append(name(op.stage, "W", key))
        if op.kind == Kind.R:
            result.append(name(op.stage, "R", key))
    return result


def fake_executors(
    schedule: Schedule, *, train: bool, recorder: Any = None
) -> tuple[list[Executor], list[list[str]]]:
    """Make executors of all ranks on queues in this process; return them and their logs by rank."""
    placement = schedule.placement
    logs: list[list[str]] = [[] for _ in range(placement.ranks)]
    executors = []
    ends = InProcessChannels.connect(placement.ranks)
    for program, channels in zip(lower(schedule), ends, strict=True):
        stages: Mapping[int, Any] = {
            stage: FakeStage(stage, placement.stages, logs[program.rank])
            for stage in placement.stages_of(program.rank)
        }
        executors.append(
            Executor(program, stages, channels, shape=scalar, train=train, recorder=recorder)
        )
    return executors, logs


def scalar(message: Op) -> tuple[int, ...]:
    """Return the shape of the messages of fake stages."""
    return ()


class FakeEnd:
    """The end of a channel, that notes what is asked of it; messages are ready-made."""

    def __init__(self, log: list[str], peer: int) -> None:
        self.log, self.peer = log, peer

    def expect(self, expected: list[tuple[Op, tuple[int, ...]]]) -> None:
        texts = [f"{message} {list(shape)}" for message, shape in expected]
        self.log.append(f"from {self.peer} expect {', '.join(texts)}")

    def post(self) -> None:
        self.log.append(f"from {self.peer} posted")

    def arrived(self) -> bool:
        return True

    def receive(self) -> torch.Tensor:
        self.log.append(f"from {self.peer}")
        return torch.tensor(0.0)

    def send(self, message: Op, tensor: torch.Tensor) -> None:
        self.log.append(f"to {self.peer} {message}={tensor.item():g}")

    def acknowledge(self, messages: int) -> None:
        self.log.append(f"{self.peer} has received {messages}")

    def finish(self) -> None:
        self.log.append(f"to {self.peer} finished")

    def suspend(self) -> int:
        self.log.append(f"to {self.peer} set aside")
        return 1

    def restore(self, messages: int) -> None:
        self.log.append(f"to {self.peer} taken back {messages}")


class FakeChannels:
    """Ends of channels to and from the given ranks, with one log."""

    def __init__(self, log: list[str], *peers: int) -> None:
        ends: Any = {peer: FakeEnd(log, peer) for peer in peers}
        self.outgoing = ends
        self.incoming = ends
