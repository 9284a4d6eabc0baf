"""Scatter/gather of pipeline messages: each tensor-parallel rank sends one shard (2104.04473).

Without sequence parallelism all tp ranks of a stage have bitwise equal hidden states and gradients.
So each tp rank sends one flat shard, of equal length, to the same tp rank of the other stage. There
a message is all-gathered from the shards over tp.
"""

from __future__ import annotations

import math
from collections import deque

from torch import Tensor
from torch.nn import functional

from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather
from megapipe.distributed.shard_length import shard_length
from megapipe.engine.channels import (
    Channels,
    ExpectedMessages,
    Name,
    RecvChannel,
    SendChannel,
    Shape,
)


class ScatteredOutgoing:
    """Sends this rank's shard of each message over `line`."""

    def __init__(self, line: SendChannel, tp: Axis) -> None:
        self._line = line
        self._tp = tp

    def send(self, message: Name, tensor: Tensor) -> None:
        flat, length = tensor.flatten(), shard_length(tensor.numel(), self._tp.size)
        start = self._tp.index * length
        own = flat[start : start + length]
        own = functional.pad(own, (0, length - len(own))) if len(own) < length else own.clone()
        self._line.send(message, own)

    def acknowledge(self, messages: int) -> None:
        self._line.acknowledge(messages)

    def finish(self) -> None:
        self._line.finish()

    def suspend(self) -> int:
        return self._line.suspend()

    def restore(self, messages: int) -> None:
        self._line.restore(messages)


class GatheredIncoming:
    """Receives shards over `line`, and gathers each message from the shards of all tp ranks.

    All tp ranks receive the same messages in the same order.
    """

    def __init__(self, line: RecvChannel, tp: Axis) -> None:
        self._line = line
        self._tp = tp
        self._shapes: deque[Shape] = deque()

    def expect(self, expected: ExpectedMessages) -> None:
        self._shapes.extend(shape for _, shape in expected)
        shares = [
            (message, (shard_length(math.prod(shape), self._tp.size),))
            for message, shape in expected
        ]
        self._line.expect(shares)

    def post(self) -> None:
        self._line.post()

    def arrived(self) -> bool:
        return self._line.arrived()

    def receive(self) -> Tensor:
        shape = self._shapes.popleft()
        whole = all_gather(self._line.receive(), self._tp)
        return whole[: math.prod(shape)].view(shape)


class ScatterGatherChannels:
    """Wraps `channels` to send each message in shards, one per tensor-parallel rank of `tp`."""

    def __init__(self, channels: Channels, tp: Axis) -> None:
        self.outgoing = {p: ScatteredOutgoing(end, tp) for p, end in channels.outgoing.items()}
        self.incoming = {p: GatheredIncoming(end, tp) for p, end in channels.incoming.items()}
