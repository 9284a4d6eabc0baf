"""A tied embedding in a pipeline that never flushes: updated on one stage, copied to the other.

Both stages add to its gradient, but they are through with a window at different times, and in need
of its next version at different times. A sum that both wait for, or a gather, would stall one of
them. So messages go one way at a time, in the order in which the two ends work:

    last stage     sends its gradients of a window when they are complete
    first stage    adds them to its own, updates the weight and sends the new version
    last stage     reads that in forwards which have come to it through the pipeline

Each rank of the last stage has one of the first stage that is its counterpart: of the same replica
and the same tensor-parallel index. Both ways have a group of their own, so that none has to be used
before the other.

A receive begins before its message is there, so that this has a window's time to come, but on NCCL:
one that waits there may hold up a kernel that is loaded meanwhile, and with it the other end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait, done, start_receive, start_send


class TiedEmbeddingLink:
    """One end between a rank that `updates` its slice of a tied weight and one that has a copy.
    Receives begin `early`, or when their message is needed."""

    def __init__(self, gradients: Axis, weights: Axis, *, updates: bool, early: bool) -> None:
        self.updates = updates
        self._early = early
        self._gradients = gradients
        self._weights = weights
        self._sent: Wait = done
        """Waits for what this end has sent last."""
        self.arriving = torch.empty(0)
        """Where the gradients of the other end are received."""
        self._arrived: Wait | None = None
        """Waits for them; None: no receive has begun."""

    def connect(self, device: torch.device) -> None:
        """Send a first message each way, so that none waits for a connection later."""
        greeting = torch.zeros(1, device=device)
        first, second = (start_receive, start_send) if self.updates else (start_send, start_receive)
        first(greeting, self._gradients)()
        second(greeting, self._weights)()

    def await_sent(self) -> None:
        """Wait until what this end has sent may change."""
        self._sent()
        self._sent = done

    def expect_gradients(self, like: Tensor) -> None:
        """Gradients of the next window are to come, as many as those in `like`."""
        if self._early and self._arrived is None:
            self._receive(like)

    def _receive(self, like: Tensor) -> Wait:
        if len(self.arriving) != len(like):
            self.arriving = torch.empty_like(like)
        self._arrived = start_receive(self.arriving, self._gradients)
        return self._arrived

    def add_gradients(self, own: Tensor) -> None:
        """Add the gradients of the other end to this one's, once they are there."""
        arrived = self._arrived or self._receive(own)
        arrived()
        self._arrived = None
        own += self.arriving

    def send_gradients(self, own: Tensor) -> None:
        """Begin to send this end's gradients, which stay as they are until :meth:`await_sent`."""
        self.await_sent()
        self._sent = start_send(own, self._gradients)

    def send_weights(self, whole: Tensor) -> None:
        """Begin to send all weights, which stay as they are until :meth:`await_sent`."""
        self.await_sent()
        self._sent = start_send(whole, self._weights)

    def receive_weights(self, whole: Tensor) -> Wait:
        """Begin to receive all weights; returns a wait for them."""
        if self._early:
            return start_receive(whole, self._weights)
        return lambda: start_receive(whole, self._weights)()
