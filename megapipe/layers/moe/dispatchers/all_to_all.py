"""All-to-all dispatch: each row is sent to its expert's rank, in one all-to-all, or in one within
nodes and one between nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapipe.config.experts import ExpertsConfig
from megapipe.distributed.axis import Axis
from megapipe.distributed.mesh import ParallelMesh
from megapipe.layers.moe.chunks import ExpertChunk
from megapipe.layers.moe.dispatch import Dispatch, Dispatcher, DispatchPlan, Prefetch, joined
from megapipe.layers.moe.permutation import ExpertCounts
from megapipe.layers.moe.row_codec import UNCODED, RowCodec
from megapipe.layers.moe.transfer import (
    Moved,
    Step,
    Transfer,
    combine_steps,
    dispatch_steps,
)


@dataclass(frozen=True)
class AllToAllDispatcher(Dispatcher):
    """Sends each row to the rank of its expert."""

    def arrival(self, choice: Tensor, counts: ExpertCounts, plan: DispatchPlan) -> Tensor:
        index, device = self.ep.index, choice.device
        return joined([_expert_order(counts, chunk, index, device) for chunk in plan.chunks])

    def restore(self, plan: DispatchPlan, *tensors: Tensor) -> Dispatch:
        return AllToAllDispatch(plan, *tensors)


@dataclass(frozen=True)
class HierarchicalDispatcher(AllToAllDispatcher):
    """Sends each row within its node first, then between nodes (Tutel; Hwang, 2206.03382)."""

    within: Axis = field(default_factory=Axis.alone)
    """Ranks of this node."""
    between: Axis = field(default_factory=Axis.alone)
    """Ranks of all nodes with the same local index as this rank."""

    hops = 2

    @classmethod
    def settings(cls, config: ExpertsConfig, mesh: ParallelMesh) -> dict[str, Any]:
        assert mesh.ep_hops is not None, "made with experts.ranks_per_node"
        within, between = mesh.ep_hops
        return super().settings(config, mesh) | {"within": within, "between": between}

    def dispatch_steps(self, moved: Moved) -> list[Step]:
        return dispatch_steps(moved, self.ep, (self.within, self.between))

    def combine_steps(self, moved: Moved) -> list[Step]:
        return combine_steps(moved, self.ep, (self.within, self.between))


class AllToAllDispatch(Dispatch):
    """Dispatch of rows that are sent to the ranks of their experts."""

    def dispatch_tokens(self, x: Tensor) -> Prefetch[Tensor]:
        codec = self.plan.dispatcher.row_codec
        return _Rows(self, lambda part: self.rows.permute(x, part), codec)

    def dispatch_weights(self, values: Tensor) -> Prefetch[Tensor]:
        return _Rows(self, lambda part: self.rows.permute_weights(values, part), UNCODED)

    def to_source_order(self, number: int, rows: Tensor) -> Tensor:
        if self.plan.alone:
            return rows
        ordered = torch.empty_like(rows)
        ordered[self.arrival[number]] = rows
        return ordered


class _Rows:
    """Transfer of rows to the ranks of their experts."""

    def __init__(
        self, dispatch: AllToAllDispatch, part_of: Callable[[slice], Tensor], codec: RowCodec
    ) -> None:
        self._dispatch, self._codec = dispatch, codec
        self._part_of = part_of
        self._transfers: dict[int, Transfer] = {}

    def start(self, number: int) -> None:
        dispatcher, chunks = self._dispatch.plan
        ep, etp, chunk = dispatcher.ep, dispatcher.etp, chunks[number]
        rows = self._part_of(chunk.token_rows)
        if etp > 1:
            sizes = [chunk.rows_between(ep.index, member) for member in range(0, ep.size, etp)]
            rows = torch.cat([part for part in rows.split(sizes) for _ in range(etp)])
        steps = dispatcher.dispatch_steps(chunk.rows_between)
        self._transfers[number] = Transfer(rows, steps, self._codec, dispatcher.start_exchange)

    def start_next_hop(self, number: int) -> None:
        self._transfers[number].start_next_hop()

    def wait(self, number: int) -> Tensor:
        rows = self._transfers.pop(number).wait()
        return rows if self._dispatch.plan.alone else rows[self._dispatch.arrival[number]]


def _expert_order(
    counts: ExpertCounts, chunk: ExpertChunk, index: int, device: torch.device
) -> Tensor:
    """Return the permutation that sorts a chunk's received rows by expert; they arrive in the order
    of source ranks."""
    rows = torch.arange(chunk.ends[-1], device=device)
    if counts.on_device is None:  # equally many for each rank and expert
        return rows.view(len(counts.by_rank), len(chunk.ends), -1).transpose(0, 1).flatten()
    first = chunk.of_each * (index // chunk.etp)
    columns = slice(first + chunk.experts.start, first + chunk.experts.stop)
    stops = counts.on_device[:, columns].flatten().cumsum(0)  # by source, then expert
    found = torch.searchsorted(stops, rows, right=True).remainder_(len(chunk.ends))
    return found.argsort(stable=True)
