"""The loss over held-out samples, computed with forward-only programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megapipe.data.batch import Samples
from megapipe.engine.executor import Executor
from megapipe.schedule.generators import forward_only
from megapipe.schedule.ir import Schedule
from megapipe.train.feed import BatchReader, Feed
from megapipe.train.step.local_stats import StepTotals
from megapipe.train.step.machine import Machine

MICROBATCHES = 64
"""Maximum number of micro-batches in one forward-only program."""


class ValidationResult(NamedTuple):
    """The result of a validation."""

    loss: float
    """Mean loss over the unmasked tokens, in nats."""
    tokens: int
    """Number of unmasked tokens."""
    stopped: bool = False
    """Whether some rank was asked to stop before all samples were seen; the loss is then nan."""


class Evaluator:
    """Runs the forward programs of validation."""

    def __init__(self, machine: Machine, feed: Feed, totals: StepTotals) -> None:
        self._machine = machine
        self._feed = feed
        self._totals = totals
        self._programs: dict[int, tuple[Schedule, list[Executor]]] = {}
        """Schedule and executors by the number of micro-batches."""

    def evaluate(
        self, rows: BatchReader, samples: int, stop: Callable[[], bool]
    ) -> ValidationResult:
        """Return the mean loss over samples 0 to `samples` - 1; end early if `stop` on any rank."""
        machine = self._machine

        def masked(indices: Sequence[int]) -> Samples:
            given = Samples(*rows(indices))
            inside = torch.tensor([i < samples for i in indices])
            return given._replace(mask=given.mask * inside.unsqueeze(1))

        per_microbatch = machine.config.train.microbatch * machine.layout.dp
        left = -(-samples // per_microbatch)
        first, total, tokens = 0, 0.0, 0
        with machine.optimizer.use_master_weights():
            while left:
                m = min(left, MICROBATCHES)
                loss, own = self.run_forward(masked, first, m)
                sums = torch.tensor([loss, own, stop()], dtype=torch.float64)
                whole = machine.mesh.ordered_sum(sums, "tp", "cp", "dp", "pp")
                loss_sum, seen, stopped = whole.tolist()
                total += loss_sum
                tokens += int(seen)
                if stopped:
                    return ValidationResult(math.nan, tokens, stopped=True)
                first += m * per_microbatch
                left -= m
        return ValidationResult(total / max(tokens, 1), tokens)

    def run_forward(self, rows: BatchReader, first: int, microbatches: int) -> tuple[float, int]:
        """Return the sum and number of the unmasked token losses on this process's last stages, for
        `microbatches` micro-batches from sample `first` on."""
        machine = self._machine
        if microbatches not in self._programs:
            schedule = forward_only(machine.placement, microbatches)
            self._programs[microbatches] = schedule, machine.executors(schedule, train=False)
        schedule, executors = self._programs[microbatches]
        given, counted = self._feed.fetch(schedule, rows, 0, first)
        machine.pipeline.run(executors, given)
        loss, counted = self._totals.own_loss(counted)
        return loss.item(), counted.tokens
