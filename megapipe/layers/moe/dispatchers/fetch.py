"""Fetched experts: weights are all-gathered, and gradients reduce-scattered to the experts' owners.

With many tokens and small experts, this sends fewer bytes than dispatching rows (Janus, Liu et al.,
SIGCOMM 2023; Tutel's switch to data parallelism). Rows stay on the rank of their tokens. Each rank
gathers the matrices of all experts, in F and again in I as with ZeRO-3, chunk by chunk, and frees a
chunk's matrices once the chunk is computed. W computes the gradients of all experts from the local
rows, and sends them to the experts' owners, which sum them in the order of the ranks. An expert
that is split over etp ranks is gathered whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait, reduce_scatter, start_all_gather_new
from megapipe.layers.moe.chunks import ExpertChunk, fetched_chunks
from megapipe.layers.moe.dispatch import DispatchPlan, Prefetch
from megapipe.layers.moe.dispatchers.all_to_all import AllToAllDispatcher
from megapipe.layers.moe.permutation import ExpertCounts
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.moe.weights import ExpertGrads, ExpertWeights, Parameters
from megapipe.layers.parameter import spec_of
from megapipe.layers.weight_grad import main_grad


@dataclass(frozen=True)
class FetchDispatcher(AllToAllDispatcher):
    """Fetches the weights of all experts of the group; tokens stay on their rank."""

    @property
    def counting(self) -> Axis:
        return Axis.alone()

    def plan(self, counts: ExpertCounts, replicas: int) -> DispatchPlan:
        """Plan the expert chunks of a micro-batch whose rows stay on this rank."""
        chunks = fetched_chunks(counts.by_rank[0], self.ep.size // self.etp, self.chunks)
        return DispatchPlan(AllToAllDispatcher(Axis.alone(), pad=self.pad), chunks)

    def weights(
        self,
        parameters: Parameters,
        chunks: Sequence[ExpertChunk],
        replicas: ExpertReplicas | None,
        *,
        adds_bias: bool,
    ) -> Prefetch[ExpertWeights]:
        return FetchedExperts(parameters, chunks, ExpertGroup(self.ep, self.etp))

    def grads(self, chunks: Sequence[ExpertChunk], replicas: ExpertReplicas | None) -> ExpertGrads:
        return FetchedExpertGrads(ExpertGroup(self.ep, self.etp), chunks)


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that together have all experts."""

    ep: Axis
    etp: int
    """Number of adjacent ranks of `ep` that share one expert."""

    def start_fetching(self, parameter: Parameter, part: slice) -> tuple[Tensor, Wait]:
        """Start to all-gather a parameter of the experts in range `part` of each rank."""
        return start_all_gather_new(parameter.detach()[part], self.ep)

    def unshard(self, gathered: Tensor, parameter: Parameter) -> Tensor:
        """Join the etp parts of gathered experts: [ranks * experts per rank, ...] -> [experts,
        ...]."""
        parts = gathered.unflatten(0, (self.ep.size // self.etp, self.etp, -1))
        inner = spec_of(parameter).inner_dim
        if inner is None:  # all ranks that share an expert have equal values
            return parts[:, 0].flatten(0, 1)
        return parts.movedim(1, inner + 1).flatten(inner + 1, inner + 2).flatten(0, 1)

    def reduce_scatter_grads(self, grad: Tensor, parameter: Parameter) -> None:
        """Reduce-scatter the gradients of all experts, [ranks / etp, experts of each, ...], into
        the main gradients of the experts' owners."""
        inner, etp = spec_of(parameter).inner_dim, self.etp
        if inner is None:
            parts = grad.unsqueeze(1).expand(-1, etp, *(-1 for _ in grad.shape[1:]))
        else:
            parts = grad.unflatten(inner + 1, (etp, -1)).movedim(inner + 1, 1)
        accumulated = main_grad(parameter)
        accumulated += reduce_scatter(parts.flatten(0, 2), self.ep).view_as(accumulated)


class FetchedExperts:
    """Weights of the experts of all ranks, chunk by chunk."""

    def __init__(
        self, parameters: Parameters, chunks: Sequence[ExpertChunk], group: ExpertGroup
    ) -> None:
        self._parameters, self._chunks, self._group = parameters, chunks, group
        self._fetching: dict[int, list[tuple[Tensor, Wait] | None]] = {}

    def start(self, number: int) -> None:
        part = self._chunks[number].experts
        self._fetching[number] = [
            None if p is None else self._group.start_fetching(p, part) for p in self._parameters
        ]

    def start_next_hop(self, number: int) -> None:
        """Start nothing: there is only one exchange."""

    def wait(self, number: int) -> ExpertWeights:
        found: list[Tensor | None] = []
        for parameter, fetched in zip(self._parameters, self._fetching.pop(number), strict=True):
            if parameter is None or fetched is None:
                found.append(None)
                continue
            gathered, wait = fetched
            wait()
            found.append(self._group.unshard(gathered, parameter))
        return ExpertWeights(*found)  # type: ignore[arg-type]


class FetchedExpertGrads(ExpertGrads):
    """Accumulators for gradients of fetched experts, in the order of chunks; their sums over ranks
    go to the experts' owners."""

    def __init__(self, group: ExpertGroup, chunks: Sequence[ExpertChunk]) -> None:
        super().__init__()
        self._group, self._chunks = group, chunks

    def of(self, parameter: Parameter) -> Tensor:
        """Return zeros for gradients of all experts, with the whole FFN hidden size."""
        like, inner = main_grad(parameter), spec_of(parameter).inner_dim
        shape = list(like.shape)
        shape[0] *= self._group.ep.size // self._group.etp
        if inner is not None:
            shape[inner] *= self._group.etp
        return like.new_zeros(shape)

    def finish(self, grads: Tensor | Sequence[Tensor], parameter: Parameter) -> None:
        """Reduce-scatter the gradients into the experts' owners' main gradients. Collective."""
        assert isinstance(grads, Tensor)
        parts = self._group.ep.size // self._group.etp
        of_chunks = grads.split([len(chunk.ends) for chunk in self._chunks])
        by_rank = torch.cat([own.unflatten(0, (parts, -1)) for own in of_chunks], 1)
        self._group.reduce_scatter_grads(by_rank, parameter)
