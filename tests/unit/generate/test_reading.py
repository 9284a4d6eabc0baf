"""The positions that a model is told while it reads texts side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.generate.reading import Reading
from megapipe.layers.microbatch import MicroBatch

END = 256
TEXTS = [[END, 1, 2, END, 3], [END, 9]]


class Model:
    """Remembers positions, row after row."""

    def __init__(self) -> None:
        self.positions: list[Any] = []

    def logits(self, x: None, mb: MicroBatch, cache: Any, *, last: bool) -> Tensor:
        assert mb.tokens is not None
        self.positions.append(None if mb.positions is None else mb.positions.t().tolist())
        return torch.zeros(1, len(mb.tokens), 300)


@pytest.mark.parametrize(
    ("resets", "expected"),
    [
        (False, [[[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]], [[5], [2]]]),
        (True, [[[0, 0, 1, 2, 0], [0, 1, 2, 0, 0]], [[1], [1]]]),
    ],
)
def test_positions_count_from_the_text_or_from_each_document(resets: bool, expected: Any) -> None:
    model: Any = Model()
    reading = Reading(
        model,
        TEXTS,
        context=16,
        room=4,
        device=torch.device("cpu"),
        document_end=END,
        resets_positions=resets,
    )
    reading.logits()
    reading.append([7, 7])
    reading.logits()
    assert model.positions == expected
