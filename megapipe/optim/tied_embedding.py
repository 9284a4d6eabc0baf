"""A tied embedding in a no-flush pipeline: the first stage updates it and sends it to the last.

Both stages add to the gradient, but they finish an update window, and need the next weight version,
at different times. A reduction or an all-gather that both wait for would stall one stage. So
messages go one way at a time, in the order in which the two ends work:

    last stage     sends its gradients of an update window when they are complete
    first stage    adds them to its own, updates the weight and sends the new version
    last stage     reads the new version in forwards that arrive through the pipeline

Each rank of the last stage has a counterpart on the first stage, with the same replica and
tensor-parallel index. Each direction has its own process group, so that no order between the
directions is needed.

A receive is posted early, so that the message has an update window's time to arrive. On NCCL it is
posted only when needed: a pending receive may block a kernel that is loaded meanwhile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import Wait, done, start_receive, start_send


class TiedEmbeddingLink:
    """One end of the pair of ranks that share a tied embedding: one end `updates` its shard, the
    other only has the weights. With `early`, receives are posted ahead of need."""

    def __init__(self, gradients: Axis, weights: Axis, *, updates: bool, early: bool) -> None:
        self.updates = updates
        self._early = early
        self._gradients = gradients
        self._weights = weights
        self._sent: Wait = done
        """Function that waits for this end's last send."""
        self.arriving = torch.empty(0)
        """Buffer for the gradients of the other end."""
        self._arrived: Wait | None = None
        """Function that waits for the other end's gradients; None: no receive is posted."""

    def connect(self, device: torch.device) -> None:
        """Send a first message each way, so that no later message waits for a connection."""
        greeting = torch.zeros(1, device=device)
        first, second = (start_receive, start_send) if self.updates else (start_send, start_receive)
        first(greeting, self._gradients)()
        second(greeting, self._weights)()

    def await_sent(self) -> None:
        """Wait until the memory of this end's last send may change."""
        self._sent()
        self._sent = done

    def expect_gradients(self, like: Tensor) -> None:
        """Post the receive of the next update window's gradients, shaped as `like`, if receives
        are posted early."""
        if self._early and self._arrived is None:
            self._receive(like)

    def _receive(self, like: Tensor) -> Wait:
        if len(self.arriving) != len(like):
            self.arriving = torch.empty_like(like)
        self._arrived = start_receive(self.arriving, self._gradients)
        return self._arrived

    def add_gradients(self, own: Tensor) -> None:
        """Wait for the other end's gradients and add them to `own`."""
        arrived = self._arrived or self._receive(own)
        arrived()
        self._arrived = None
        own += self.arriving

    def send_gradients(self, own: Tensor) -> None:
        """Start sending the gradients `own`, which must not change until :meth:`await_sent`."""
        self.await_sent()
        self._sent = start_send(own, self._gradients)

    def send_weights(self, whole: Tensor) -> None:
        """Start sending the weights `whole`, which must not change until :meth:`await_sent`."""
        self.await_sent()
        self._sent = start_send(whole, self._weights)

    def receive_weights(self, whole: Tensor) -> Wait:
        """Receive the weights into `whole`; return a function that waits for them."""
        if self._early:
            return start_receive(whole, self._weights)
        return lambda: start_receive(whole, self._weights)()
