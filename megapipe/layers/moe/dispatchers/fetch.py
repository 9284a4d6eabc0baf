"""Fetched experts: weights are gathered from all ranks, and gradients sent to those that have them.

Where tokens are many and experts small, fewer bytes travel so (Janus, Liu et al., SIGCOMM 2023;
Tutel's switch to data parallelism). Rows stay where their tokens are. Each rank gathers the
matrices of all experts, in F and again in I as with ZeRO-3, chunk by chunk, and frees them when it
has computed the chunk. W makes the gradients of all experts from the rows here, and sends them to
the ranks that have the experts, which add them up in the order of the ranks. An expert that is
split over etp ranks is put together.
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
    """Fetches the weights of all experts of the group; tokens stay."""

    @property
    def counting(self) -> Axis:
        return Axis.alone()

    def plan(self, counts: ExpertCounts, replicas: int) -> DispatchPlan:
        """Plan the chunks of a micro-batch, whose rows stay."""
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
    """The ranks that have all experts together."""

    ep: Axis
    etp: int
    """Neighbours among them that have parts of the same experts."""

    def start_fetching(self, parameter: Parameter, part: slice) -> tuple[Tensor, Wait]:
        """Begin to gather some experts of each rank."""
        return start_all_gather_new(parameter.detach()[part], self.ep)

    def unshard(self, gathered: Tensor, parameter: Parameter) -> Tensor:
        """[ranks * experts of each, ...] of parts -> [experts, ...]."""
        parts = gathered.unflatten(0, (self.ep.size // self.etp, self.etp, -1))
        inner = spec_of(parameter).inner_dim
        if inner is None:  # all who share an expert have the same
            return parts[:, 0].flatten(0, 1)
        return parts.movedim(1, inner + 1).flatten(inner + 1, inner + 2).flatten(0, 1)

    def reduce_scatter_grads(self, grad: Tensor, parameter: Parameter) -> None:
        """Add gradients of all experts [ranks with others, experts of each, ...] into the main
        gradients of the ranks that have them."""
        inner, etp = spec_of(parameter).inner_dim, self.etp
        if inner is None:
            parts = grad.unsqueeze(1).expand(-1, etp, *(-1 for _ in grad.shape[1:]))
        else:
            parts = grad.unflatten(inner + 1, (etp, -1)).movedim(inner + 1, 1)
        home = main_grad(parameter)
        home += reduce_scatter(parts.flatten(0, 2), self.ep).view_as(home)


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
        """There is one hop alone."""

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
    """Where gradients of fetched experts are added: into memory of their own, in the order of
    chunks, whose sums over ranks go to the ranks that have the experts."""

    def __init__(self, group: ExpertGroup, chunks: Sequence[ExpertChunk]) -> None:
        super().__init__()
        self._group, self._chunks = group, chunks

    def of(self, parameter: Parameter) -> Tensor:
        """Return zeros for gradients of all experts, each of the whole width."""
        like, inner = main_grad(parameter), spec_of(parameter).inner_dim
        shape = list(like.shape)
        shape[0] *= self._group.ep.size // self._group.etp
        if inner is not None:
            shape[inner] *= self._group.etp
        return like.new_zeros(shape)

    def finish(self, grads: Tensor | Sequence[Tensor], parameter: Parameter) -> None:
        """Add them into the main gradients of the ranks that have the experts, which all call
        it."""
        assert isinstance(grads, Tensor)
        parts = self._group.ep.size // self._group.etp
        of_chunks = grads.split([len(chunk.ends) for chunk in self._chunks])
        by_rank = torch.cat([own.unflatten(0, (parts, -1)) for own in of_chunks], 1)
        self._group.reduce_scatter_grads(by_rank, parameter)
