"""Messages for channels, and their contents."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megapipe.schedule.ir import Kind, Op

FORWARD = [Op(Kind.F, 0, i) for i in range(4)]
ANSWERS = [Op(Kind.I, 1, i) for i in range(2)]


def shape_of(message: Op) -> tuple[int, ...]:
    return (2, 3 + message.microbatch)


def expected(messages: Sequence[Op]) -> list[tuple[Op, tuple[int, ...]]]:
    return [(message, shape_of(message)) for message in messages]


def tensor_of(message: Op, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.full(shape_of(message), float(message.microbatch + 1), dtype=dtype)
