"""Replicas of weights beside the buckets, without states: what the optimizer asks of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from megapipe.distributed.collectives import Wait


class SharedTensor(NamedTuple):
    """A tensor that other ranks have too."""

    key: str
    """The same on all of them, and of no other tensor."""
    words: str
    """The tensor in words, for a message."""
    values: Tensor


class WeightReplicas(Protocol):
    """Replicas of some weights of a layer. They follow each update of their owners, which get their
    gradients once a step. All ranks that share the layer call each method, in the same order."""

    def zero_grad(self) -> None:
        """Begin a step."""

    def start_broadcast(self) -> None:
        """Start to send the weights here to their replicas, if they have changed since."""

    def wait_broadcast(self) -> None:
        """Wait for the weights of the replicas here."""

    def mark_stale(self) -> None:
        """Note that weights have changed, or are about to."""

    def start_grad_return(self) -> tuple[Tensor, Wait] | None:
        """Start to send the gradients of the replicas here to their owners."""

    def add_returned_grads(self, received: Tensor) -> None:
        """Add gradients of replicas to those of the weights here."""

    def replicated_weights(self) -> Iterator[SharedTensor]:
        """Yield the tensors here that have replicas or are some."""
