"""A rank's part of the totals of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megapipe.observe.memory import memory_gib
from megapipe.optim.loss_scaler import LossScaler
from megapipe.train.feed import LocalTokens
from megapipe.train.make_followers import routing_totals
from megapipe.train.step.machine import Machine
from megapipe.train.step_stats import LARGEST, RankRequests, SourceStats, StepStats


def local_step_stats(
    machine: Machine,
    squares: Tensor,
    loss: Tensor,
    counted: LocalTokens,
    requests: Callable[[], RankRequests],
) -> StepStats:
    """Return this rank's part of the totals of a step whose backward passes are done. `squares` has
    squared norms of gradients; `loss` and `counted` come from :func:`local_loss`."""
    routing = routing_totals(machine, counted.scratches)
    some = [*routing, squares, loss, machine.optimizer.states_finite(), *counted.summed_losses()]
    values = machine.mesh.to_host(torch.cat(some))  # the step's only wait for a GPU
    begin, end = sum(map(len, routing)), len(values) - len(counted.by_source)
    by_source = tuple(map(SourceStats, values[end:], counted.by_source))
    memory = memory_gib(machine.mesh.device) or 0.0
    *numbers, loss_sum, states = values[begin:end]
    return StepStats(
        tuple(numbers),
        loss_sum,
        counted.tokens,
        requests(),
        by_source,
        tuple(values[:begin]),
        states,
        memory_gib=memory,
    )


def local_loss(
    machine: Machine, counted: LocalTokens, microbatches: int | None = None
) -> tuple[Tensor, LocalTokens]:
    """Return the sum of this rank's unmasked token losses, in micro-batch order, and the token
    counts. As tp ranks have equal losses, all except one return 0 (or NaN if not finite) and no
    tokens. If `microbatches` is set, only losses of micro-batches of smaller index are summed."""
    total = torch.zeros(1, dtype=torch.float64, device=machine.mesh.device)
    if machine.last is not None:
        for key in sorted(machine.last.loss_sums):
            if microbatches is None or key[0] < microbatches:
                total += machine.last.loss_sums[key]
    if machine.mesh.tp.index > 0:
        return total * 0.0, counted.none()
    return total, counted


class StepTotals:
    """Sums the ranks' parts of a step's totals. `sources` is the number of sources of a mixture, 0
    without a mixture."""

    def __init__(self, machine: Machine, scaler: LossScaler, sources: int) -> None:
        self._machine = machine
        self._scaler = scaler
        self._sources = sources

    def own_loss(self, counted: LocalTokens) -> tuple[Tensor, LocalTokens]:
        """Return the sum of this rank's unmasked token losses, and its token counts."""
        return local_loss(self._machine, counted)

    def own(self, counted: LocalTokens, requests: Callable[[], RankRequests]) -> StepStats:
        """Return this rank's part of the totals of a step whose backward passes are done."""
        squares = self._machine.optimizer.finish_reduce(self._scaler.scale)
        return local_step_stats(self._machine, squares, *self.own_loss(counted), requests)

    def whole(
        self, counted: LocalTokens, requests: Callable[[], RankRequests], ahead: float
    ) -> StepStats:
        """Return the totals of all ranks, by the only reduction at the end of a step. `ahead`: this
        rank's number of unmasked tokens in the next step, NaN if unknown. Collective."""
        own = replace(self.own(counted, requests), ahead=ahead).pack()
        mesh = self._machine.mesh
        return self.unpack(mesh.ordered_sum(own, "tp", "cp", "dp", "pp", largest=LARGEST))

    def unpack(self, vector: Tensor) -> StepStats:
        """Unpack a packed vector of totals, with the sources and routing totals of this run."""
        num_stats = sum(self._machine.layout.model.routing_stat_counts().values())
        return StepStats.unpack(vector, self._sources, num_stats)
