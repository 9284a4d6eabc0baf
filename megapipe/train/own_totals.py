"""The part of a rank in the totals of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megapipe.observe.memory import memory_gib
from megapipe.train.feed import Counted
from megapipe.train.routing import summed_loads
from megapipe.train.totals import SourceTotal, Totals, Wishes

if TYPE_CHECKING:
    from megapipe.train.step import TrainStep


def own_totals(
    step: TrainStep, squares: Tensor, loss: Tensor, counted: Counted, wishes: Callable[[], Wishes]
) -> Totals:
    """This rank's part of the totals of a step whose backward passes are done, of which `squares`
    are those of the gradients, and `loss` and `counted` of :func:`own_loss`."""
    routing = summed_loads(step.layout.model.told(), counted.loads, step.mesh.device)
    some = [*routing, squares, loss, step.optimizer.states_finite(), *counted.summed_losses()]
    values = step.mesh.computed(torch.cat(some))  # the step's one wait for a GPU
    begin, end = sum(map(len, routing)), len(values) - len(counted.by_source)
    by_source = tuple(map(SourceTotal, values[end:], counted.by_source))
    memory = memory_gib(step.mesh.device) or 0.0
    *numbers, loss_sum, states = values[begin:end]
    return Totals(
        tuple(numbers),
        loss_sum,
        counted.tokens,
        wishes(),
        by_source,
        tuple(values[:begin]),
        states,
        memory,
    )


def own_loss(
    step: TrainStep, counted: Counted, microbatches: int | None = None
) -> tuple[Tensor, Counted]:
    """Sum of this rank's unmasked token losses, micro-batches in order, and its tokens; 0, or NaN
    if they are not finite, on all but one of the tp ranks, which have the same. All micro-batches
    count that the last stage has the losses of, or the first `microbatches`."""
    total = torch.zeros(1, dtype=torch.float64, device=step.mesh.device)
    if step.last is not None:
        for key in sorted(step.last.loss_sums):
            if microbatches is None or key[0] < microbatches:
                total += step.last.loss_sums[key]
    if step.mesh.tp.index > 0:
        return total * 0.0, counted.none()
    return total, counted
