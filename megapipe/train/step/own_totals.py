"""The part of a rank in the totals of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megapipe.observe.memory import memory_gib
from megapipe.optim.scaler import LossScaler
from megapipe.train.feed import LocalTokens
from megapipe.train.routing import routing_totals
from megapipe.train.step.machine import Machine
from megapipe.train.totals import LARGEST, SourceStats, StepStats, Wishes


def local_step_stats(
    machine: Machine,
    squares: Tensor,
    loss: Tensor,
    counted: LocalTokens,
    wishes: Callable[[], Wishes],
) -> StepStats:
    """This rank's part of the totals of a step whose backward passes are done, of which `squares`
    are those of the gradients, and `loss` and `counted` of :func:`local_loss`."""
    routing = routing_totals(machine, counted.scratches)
    some = [*routing, squares, loss, machine.optimizer.states_finite(), *counted.summed_losses()]
    values = machine.mesh.to_host(torch.cat(some))  # the step's one wait for a GPU
    begin, end = sum(map(len, routing)), len(values) - len(counted.by_source)
    by_source = tuple(map(SourceStats, values[end:], counted.by_source))
    memory = memory_gib(machine.mesh.device) or 0.0
    *numbers, loss_sum, states = values[begin:end]
    return StepStats(
        tuple(numbers),
        loss_sum,
        counted.tokens,
        wishes(),
        by_source,
        tuple(values[:begin]),
        states,
        memory_gib=memory,
    )


def local_loss(
    machine: Machine, counted: LocalTokens, microbatches: int | None = None
) -> tuple[Tensor, LocalTokens]:
    """Sum of this rank's unmasked token losses, micro-batches in order, and its tokens; 0, or NaN
    if they are not finite, on all but one of the tp ranks, which have the same. All micro-batches
    count that the last stage has the losses of, or the first `microbatches`."""
    total = torch.zeros(1, dtype=torch.float64, device=machine.mesh.device)
    if machine.last is not None:
        for key in sorted(machine.last.loss_sums):
            if microbatches is None or key[0] < microbatches:
                total += machine.last.loss_sums[key]
    if machine.mesh.tp.index > 0:
        return total * 0.0, counted.none()
    return total, counted


class StepTotals:
    """Adds up what the ranks have of a step. `sources` are those of a mixture, 0 if there is
    none."""

    def __init__(self, machine: Machine, scaler: LossScaler, sources: int) -> None:
        self._machine = machine
        self._scaler = scaler
        self._sources = sources

    def own_loss(self, counted: LocalTokens) -> tuple[Tensor, LocalTokens]:
        """Sum of this rank's unmasked token losses, and its tokens."""
        return local_loss(self._machine, counted)

    def own(self, counted: LocalTokens, wishes: Callable[[], Wishes]) -> StepStats:
        """This rank's part of the totals of a step whose backward passes are done."""
        squares = self._machine.optimizer.finish_reduce(self._scaler.scale)
        return local_step_stats(self._machine, squares, *self.own_loss(counted), wishes)

    def whole(self, counted: LocalTokens, wishes: Callable[[], Wishes], ahead: float) -> StepStats:
        """The totals of all ranks, which all call it: the one exchange at the end of a step. With
        them goes what this rank has of the tokens of the next step, NaN where it does not know."""
        own = replace(self.own(counted, wishes), ahead=ahead).pack()
        mesh = self._machine.mesh
        return self.unpack(mesh.ordered_sum(own, "tp", "cp", "dp", "pp", largest=LARGEST))

    def unpack(self, vector: Tensor) -> StepStats:
        """The totals that a vector of this run packs."""
        told = sum(self._machine.layout.model.routing_stat_counts().values())
        return StepStats.unpack(vector, self._sources, told)
