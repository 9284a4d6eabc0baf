"""Weights of the experts that a rank computes, chunk by chunk, and their gradient accumulators."""

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
    """Up-projection, [experts, (2,) f, h]."""
    up_bias: Tensor | None
    down: Tensor
    """Down-projection, [experts, h, f]."""
    down_bias: Tensor | None
    """Bias [experts, h]. Also None if another etp rank of the same experts adds the bias."""


Parameters = tuple[Parameter, Parameter | None, Parameter, Parameter | None]
"""Expert parameters of a layer on this rank, in the order of :class:`ExpertWeights`."""


class LocalExperts:
    """Weights of the experts that this rank owns, and of the local replicas."""

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
        """Start sending weights to replicas, once, if `number` is the chunk of the replicas."""
        if self._replicas is not None and self._chunks[number].experts.start == self._owned:
            self._replicas.start_broadcast()

    def start_next_hop(self, number: int) -> None:
        """Start nothing: nothing is sent."""

    def wait(self, number: int) -> ExpertWeights:
        part = self._chunks[number].experts
        found = [None if p is None else self._part(p, part) for p in self._parameters]
        return ExpertWeights(*found)  # type: ignore[arg-type]

    def _part(self, parameter: Parameter, part: slice) -> Tensor:
        if self._replicas is None or part.start < self._owned:
            return parameter[part]
        return self._replicas.weights(parameter)[: part.stop - part.start]


class ExpertGrads:
    """Accumulators for gradients of the experts that this rank computes: main gradients of its
    owned experts and of its replicas."""

    def __init__(self, replicas: ExpertReplicas | None = None) -> None:
        self._replicas = replicas

    def of(self, parameter: Parameter) -> Tensor | Sequence[Tensor]:
        """Return the accumulators for the gradients of `parameter`, [experts, ...]."""
        if self._replicas is None:
            return main_grad(parameter)
        return self._replicas.main_grads(parameter)

    def finish(self, grads: Tensor | Sequence[Tensor], parameter: Parameter) -> None:
        """Finish the accumulators that :meth:`of` returned, once all gradients are added to them.
        Fetched experts need it; here it does nothing."""
