"""The loss over held-out samples, batch after batch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.data.batch import Samples
from megapipe.train.evaluation import MICROBATCHES, evaluate


@pytest.mark.parametrize("value", [True, 2, 5])
def test_every_sample_counts_once_and_none_beyond_the_last(value: Any) -> None:
    """Also where the mask says of which source a token is."""
    seen: list[int] = []

    def rows(indices: Sequence[int]) -> Samples:
        tokens = torch.tensor(list(indices)).unsqueeze(1)
        kind = torch.bool if value is True else torch.uint8
        return Samples(tokens, tokens, torch.full(tokens.shape, value, dtype=kind))

    def run_forward(given: Any, first: int, microbatches: int) -> tuple[float, int]:
        assert microbatches <= MICROBATCHES
        found = given(range(first, first + 2 * microbatches))
        kept = found.mask != 0
        assert (found.mask[kept] == value).all()
        seen.extend(found.tokens[kept].tolist())
        return float(found.tokens[kept].sum()), int(kept.sum())

    class Mesh:
        def ordered_sum(self, vector: Tensor, *axes: str) -> Tensor:
            return vector

    step: Any = SimpleNamespace(
        config=SimpleNamespace(train=SimpleNamespace(microbatch=2)),
        layout=SimpleNamespace(dp=1),
        run_forward=run_forward,
        mesh=Mesh(),
        optimizer=SimpleNamespace(true_weights=nullcontext),
    )
    found = evaluate(step, rows, 301, lambda: False)
    assert seen == list(range(301))
    assert (found.loss, found.tokens) == (150.0, 301)
