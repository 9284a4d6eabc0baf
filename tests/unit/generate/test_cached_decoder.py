"""The positions that a model is told while it reads texts side by side."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.generate.cached_decoder import CachedDecoder
from tests.parity.in_memory_models import BYTES, held_model
from tests.parity.reference import init_random
from tests.unit.generate.checkpoints import make_config

END = BYTES.eod
TEXTS = [[END, 1, 2, END, 3], [END, 9]]


@pytest.mark.parametrize(
    ("resets", "expected"),
    [
        (False, [[[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]], [[5], [2]]]),
        (True, [[[0, 0, 1, 2, 0], [0, 1, 2, 0, 0]], [[1], [1]]]),
    ],
)
def test_positions_count_from_the_text_or_from_each_document(
    resets: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config().model.model_copy(update={"max_positions": 16})
    model = held_model(
        config,
        init_random(config, seed=1),
        context=16,
        document_mask=True,
        reset_position_ids=resets,
    )
    told: list[Any] = []
    microbatch = model.microbatch

    def noted(*args: Any, **more: Any) -> Any:
        mb = microbatch(*args, **more)
        told.append(None if mb.positions is None else mb.positions.t().tolist())
        return mb

    monkeypatch.setattr(model, "microbatch", noted)
    reading = CachedDecoder(model, TEXTS, room=4)
    reading.logits()
    reading.append([7, 7])
    reading.logits()
    assert told == expected
