"""Messages of several tensors, sent as one byte tensor with all of them concatenated."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megapipe.engine.channels import (
    Channels,
    ExpectedMessages,
    Name,
    RecvChannel,
    SendChannel,
    Shape,
)
from megapipe.ops.transfer import aligned


class PackedTensor(NamedTuple):
    """Shape and type of one tensor of a message."""

    shape: Shape
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Number of bytes of this tensor in the message, rounded up for alignment."""
        length = self.dtype.itemsize
        for size in self.shape:
            length *= size
        return aligned(length)


class PackedOutgoing:
    """Sends tuples of tensors as bytes over the channel `line`."""

    def __init__(self, line: SendChannel) -> None:
        self._line = line

    def send(self, message: Name, tensor: Tensor | tuple[Tensor, ...]) -> None:
        tensors = tensor if isinstance(tensor, tuple) else (tensor,)
        parts = [PackedTensor(tuple(each.shape), each.dtype) for each in tensors]
        whole = tensors[0].new_zeros(sum(part.bytes for part in parts), dtype=torch.uint8)
        start = 0
        for part, each in zip(parts, tensors, strict=True):
            own = each.contiguous().view(-1).view(torch.uint8)
            whole[start : start + len(own)] = own
            start += part.bytes
        self._line.send(message, whole)

    def acknowledge(self, messages: int) -> None:
        self._line.acknowledge(messages)

    def finish(self) -> None:
        self._line.finish()

    def suspend(self) -> int:
        return self._line.suspend()

    def restore(self, messages: int) -> None:
        self._line.restore(messages)


class PackedIncoming:
    """Receives bytes over the channel `line`, and returns the tensors packed into them."""

    def __init__(self, line: RecvChannel) -> None:
        self._line = line
        self._expected: deque[Sequence[PackedTensor]] = deque()

    def expect(self, expected: ExpectedMessages) -> None:
        self._expected.extend(parts for _, parts in expected)
        self._line.expect(
            [(message, (sum(part.bytes for part in parts),)) for message, parts in expected]
        )

    def post(self) -> None:
        self._line.post()

    def arrived(self) -> bool:
        return self._line.arrived()

    def receive(self) -> Tensor | tuple[Tensor, ...]:
        whole, parts, start = self._line.receive(), self._expected.popleft(), 0
        tensors = []
        for part in parts:
            own = whole[start : start + part.bytes]
            flat = own.view(part.dtype)
            numel = 1
            for size in part.shape:
                numel *= size
            tensors.append(flat[:numel].view(part.shape))
            start += part.bytes
        return tensors[0] if len(tensors) == 1 else tuple(tensors)


class PackedChannels:
    """Channels for messages of several tensors, over `channels` that carry bytes."""

    def __init__(self, channels: Channels) -> None:
        self.outgoing = {peer: PackedOutgoing(end) for peer, end in channels.outgoing.items()}
        self.incoming = {peer: PackedIncoming(end) for peer, end in channels.incoming.items()}
