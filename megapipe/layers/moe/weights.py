"""Weights of the experts that a rank computes, chunk by chunk, and where their gradients go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter

from megapipe.layers.moe.chunks import ExpertChunk
from megapipe.layers.moe.replicas import ExpertReplicas
from megapipe.layers.weight_grad import main_grad


class ExpertWeights(NamedTuple):
    """Weights and biases of the experts of a chunk."""

    up: Tensor
    """[experts, (2,) f, h]"""
    up_bias: Tensor | None
    down: Tensor
    """[experts, h, f]"""
    down_bias: Tensor | None
    """None also where another rank adds it, of those that have parts of the same experts."""


Parameters = tuple[Parameter, Parameter | None, Parameter, Parameter | None]
"""Parameters of a layer on this rank, in the order of :class:`ExpertWeights`."""


class LocalExperts:
    """Weights of the experts of this rank, and of the replicas that it has of others'."""

    def __init__(
        self,
        parameters: Parameters,
        chunks: Sequence[ExpertChunk],
        replicas: ExpertReplicas | None = None,
        *,
        adds_bias: bool,
    ) -> None:
        *others, down_bias = parameters
        self._parameters = (*others, down_bias if adds_bias else None)
        self._chunks, self._replicas = chunks, replicas
        self._owned = len(parameters[0])

    def start(self, number: int) -> None:
        """Start sending weights of replicas, if that has not been done."""
        if self._replicas is not None and self._chunks[number].experts.start == self._owned:
            self._replicas.start_broadcast()

    def start_next_hop(self, number: int) -> None:
        """Nothing is sent."""

    def wait(self, number: int) -> ExpertWeights:
        part = self._chunks[number].experts
        found = [None if p is None else self._part(p, part) for p in self._parameters]
        return ExpertWeights(*found)  # type: ignore[arg-type]

    def _part(self, parameter: Parameter, part: slice) -> Tensor:
        if self._replicas is None or part.start < self._owned:
            return parameter[part]
        return self._replicas.weights(parameter)[: part.stop - part.start]


class ExpertGrads:
    """Where gradients of the experts that are computed here are added: into the main gradients of
    this rank's experts, and into those of replicas."""

    def __init__(self, replicas: ExpertReplicas | None = None) -> None:
        self._replicas = replicas

    def of(self, parameter: Parameter) -> Tensor | Sequence[Tensor]:
        """Return what the gradients of `parameter` are added into, [experts, ...]."""
        if self._replicas is None:
            return main_grad(parameter)
        return self._replicas.main_grads(parameter)

    def finish(self, grads: Tensor | Sequence[Tensor], parameter: Parameter) -> None:
        """Hand on what :meth:`of` returned, once all gradients are in it."""
