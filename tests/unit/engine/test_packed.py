"""Several tensors in one message: each arrives with its shape, its type and its values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.engine.packed import PackedIncoming, PackedOutgoing, PackedTensor
from megapipe.schedule.ir import Kind, Op

MESSAGES = [Op(Kind.F, 0, number) for number in range(2)]
TENSORS: list[Tensor] = [
    torch.arange(15, dtype=torch.float32).view(3, 5).t(),
    torch.tensor([[3], [-1], [2**40]]),
    torch.ones(7, dtype=torch.bfloat16) / 3,
]


class Wire:
    """A line that hands over what was sent; calls are noted."""

    def __init__(self) -> None:
        self.sent: list[Tensor] = []
        self.calls: list[Any] = []

    def send(self, message: Op, tensor: Tensor) -> None:
        self.sent.append(tensor)

    def expect(self, expected: Any) -> None:
        self.calls.append(expected)

    def receive(self) -> Tensor:
        return self.sent.pop(0)

    def post(self) -> None:
        self.calls.append("post")

    def arrived(self) -> bool:
        return bool(self.sent)

    def restore(self, messages: int) -> None:
        self.calls.append(messages)


@pytest.mark.parametrize("parts", [TENSORS[:1], TENSORS[:2], TENSORS, TENSORS[2:]], ids=len)
def test_tensors_arrive_as_they_were(parts: Sequence[Tensor]) -> None:
    wire: Any = Wire()
    there, back = PackedOutgoing(wire), PackedIncoming(wire)
    shapes = [PackedTensor(tuple(part.shape), part.dtype) for part in parts]
    back.expect([(message, shapes) for message in MESSAGES])
    size = sum(shape.bytes for shape in shapes)
    assert wire.calls == [[(message, (size,)) for message in MESSAGES]]
    for message in MESSAGES:
        there.send(message, tuple(parts))
        assert wire.sent[-1].dtype == torch.uint8
        assert len(wire.sent[-1]) == size
    for _ in MESSAGES:
        assert back.arrived()
        found = back.receive()
        assert isinstance(found, tuple) == (len(parts) > 1)
        whole = found if isinstance(found, tuple) else (found,)
        for one, other in zip(whole, parts, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)
    assert not back.arrived()


def test_a_single_tensor_needs_no_tuple() -> None:
    wire: Any = Wire()
    PackedOutgoing(wire).send(MESSAGES[0], TENSORS[1])
    PackedOutgoing(wire).send(MESSAGES[0], (TENSORS[1],))
    assert torch.equal(*wire.sent)


def test_the_rest_is_the_line_s() -> None:
    wire: Any = Wire()
    PackedIncoming(wire).post()
    PackedOutgoing(wire).restore(3)
    assert wire.calls == ["post", 3]
