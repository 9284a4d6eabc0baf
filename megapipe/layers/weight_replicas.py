"""Interface of the optimizer to expert replicas; these have no bucket and no optimizer state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor

from megapipe.distributed.collectives import Wait


class SharedTensor(NamedTuple):
    """A tensor of which other ranks have a replica, or which is a replica."""

    key: str
    """Unique key of the tensor, the same on all ranks."""
    words: str
    """Description of the tensor, for messages about device faults."""
    values: Tensor


class WeightReplicas(Protocol):
    """Weight replicas of a layer. Owners send weights after each update and get replica gradients
    once a step. All ranks that share the layer call each method, in the same order."""

    def zero_grad(self) -> None:
        """Start a step: zero the replicas' gradients."""

    def start_broadcast(self) -> None:
        """Start to send local weights to their replicas, if they changed since the last
        broadcast."""

    def wait_broadcast(self) -> None:
        """Wait for the weights of the local replicas."""

    def mark_stale(self) -> None:
        """Mark replicas as stale: weights have changed, or are about to change."""

    def start_grad_return(self) -> tuple[Tensor, Wait] | None:
        """Start to send the local replicas' gradients to their owners. Return the gradients to
        receive, and a function that waits for them; None if there are no replicas."""

    def add_returned_grads(self, received: Tensor) -> None:
        """Add gradients that replicas have sent back to the main gradients of the local weights."""

    def replicated_weights(self) -> Iterator[SharedTensor]:
        """Yield the local tensors that have replicas or are replicas."""
