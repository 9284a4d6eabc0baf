"""Experts that travel to the tokens: matrices fetched from all ranks, and gradients on their way
home.

Where tokens are many and experts small, fewer bytes travel so (Janus, Liu et al., SIGCOMM 2023;
Tutel's switch to data parallelism). Rows stay where their tokens are. Each rank gathers the
matrices of all experts, in F and again in I as with ZeRO-3, chunk by chunk, and lets go of them
when it has computed the chunk. W makes the gradients of all experts from the rows here, and gives
them to the ranks that have the experts, which add them up in the order of the ranks. An expert that
is split over etp ranks is put together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait, reduce_scatter, start_gathering
from megapipe.layers.expert_chunks import Chunk
from megapipe.layers.expert_places import ExpertPlaces
from megapipe.layers.parameter import spec_of
from megapipe.layers.weight_grad import main_grad


class Matrices(NamedTuple):
    """Weights and biases of the experts of a chunk."""

    up: Tensor
    """[experts, (2,) f, h]"""
    up_bias: Tensor | None
    down: Tensor
    """[experts, h, f]"""
    down_bias: Tensor | None
    """None also where another rank adds it, of those that have parts of the same experts."""


Parameters = tuple[Parameter, Parameter | None, Parameter, Parameter | None]
"""Those of a layer on this rank, in the order of :class:`Matrices`."""


class OwnMatrices:
    """Those of this rank, which are there, and copies in `places` of others."""

    def __init__(
        self,
        parameters: Parameters,
        chunks: Sequence[Chunk],
        places: ExpertPlaces | None = None,
        *,
        adds_bias: bool,
    ) -> None:
        *others, down_bias = parameters
        self._parameters = (*others, down_bias if adds_bias else None)
        self._chunks, self._places = chunks, places
        self._owned = len(parameters[0])

    def begin(self, number: int) -> None:
        """Copies leave for here, if they have not."""
        if self._places is not None and self._chunks[number].experts.start == self._owned:
            self._places.begin()

    def go_on(self, number: int) -> None:
        """Nothing travels."""

    def take(self, number: int) -> Matrices:
        part = self._chunks[number].experts
        found = [None if p is None else self._part(p, part) for p in self._parameters]
        return Matrices(*found)  # type: ignore[arg-type]

    def _part(self, parameter: Parameter, part: slice) -> Tensor:
        if self._places is None or part.start < self._owned:
            return parameter[part]
        return self._places.weights(parameter)[: part.stop - part.start]


@dataclass(frozen=True)
class Holders:
    """The ranks that have all experts together."""

    ep: Axis
    etp: int
    """Neighbours among them that have parts of the same experts."""

    def start_fetching(self, parameter: Parameter, part: slice) -> tuple[Tensor, Wait]:
        """Begin to gather some experts of each rank."""
        return start_gathering(parameter.detach()[part], self.ep)

    def whole(self, gathered: Tensor, parameter: Parameter) -> Tensor:
        """[ranks * experts of each, ...] of parts -> [experts, ...]."""
        parts = gathered.unflatten(0, (self.ep.size // self.etp, self.etp, -1))
        inner = spec_of(parameter).inner_dim
        if inner is None:  # all who share an expert have the same
            return parts[:, 0].flatten(0, 1)
        return parts.movedim(1, inner + 1).flatten(inner + 1, inner + 2).flatten(0, 1)

    def bring_home(self, grad: Tensor, parameter: Parameter) -> None:
        """Add gradients of all experts [ranks with others, experts of each, ...] into the main
        gradients of the ranks that have them."""
        inner, etp = spec_of(parameter).inner_dim, self.etp
        if inner is None:
            parts = grad.unsqueeze(1).expand(-1, etp, *(-1 for _ in grad.shape[1:]))
        else:
            parts = grad.unflatten(inner + 1, (etp, -1)).movedim(inner + 1, 1)
        home = main_grad(parameter)
        home += reduce_scatter(parts.flatten(0, 2), self.ep).view_as(home)


class FetchedMatrices:
    """Those of all ranks, chunk by chunk."""

    def __init__(self, parameters: Parameters, chunks: Sequence[Chunk], holders: Holders) -> None:
        self._parameters, self._chunks, self._holders = parameters, chunks, holders
        self._coming: dict[int, list[tuple[Tensor, Wait] | None]] = {}

    def begin(self, number: int) -> None:
        part = self._chunks[number].experts
        self._coming[number] = [
            None if p is None else self._holders.start_fetching(p, part) for p in self._parameters
        ]

    def go_on(self, number: int) -> None:
        """There is one hop alone."""

    def take(self, number: int) -> Matrices:
        found: list[Tensor | None] = []
        for parameter, coming in zip(self._parameters, self._coming.pop(number), strict=True):
            if parameter is None or coming is None:
                found.append(None)
                continue
            gathered, wait = coming
            wait()
            found.append(self._holders.whole(gathered, parameter))
        return Matrices(*found)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Home:
    """Where gradients of fetched experts belong, which are in the order of chunks."""

    holders: Holders
    chunks: Sequence[Chunk]

    def zeros(self, parameter: Parameter) -> Tensor:
        """For gradients of all experts, each of the whole width."""
        like, inner = main_grad(parameter), spec_of(parameter).inner_dim
        shape = list(like.shape)
        shape[0] *= self.holders.ep.size // self.holders.etp
        if inner is not None:
            shape[inner] *= self.holders.etp
        return like.new_zeros(shape)

    def add(self, grad: Tensor, parameter: Parameter) -> None:
        """Into the main gradients of the ranks that have the experts; all of them call it."""
        parts = self.holders.ep.size // self.holders.etp
        of_chunks = grad.split([len(chunk.ends) for chunk in self.chunks])
        by_rank = torch.cat([own.unflatten(0, (parts, -1)) for own in of_chunks], 1)
        self.holders.bring_home(by_rank, parameter)
