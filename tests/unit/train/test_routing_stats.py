"""What a step reports of layers with experts."""

from __future__ import annotations

import pytest

from megapipe.train.moe.routing_stats import record

EXPERTS = {1: 4, 3: 3}
TOLD = [8.0, 8.0, 1.0, 0.0, *(3.0, 1, 2, 2), 8.0, 9.0, 2.0, 4.0, *(0.0, 7, 9)]
"""For each layer: tokens, sums of balance and z, choices dropped; the choices of each expert."""


def test_a_record_of_all_layers() -> None:
    found = record(EXPERTS, TOLD, 0.5)
    assert found is not None
    assert found.numbers() == pytest.approx(
        {
            "aux_loss": (1 + 9 / 8) / 2,
            "z_loss": (1 + 2) / 16,
            "dropped_fraction": 4 / 16 / 2,
            "max_load": 9 * 3 / 16,
            "idle_experts": 1,
            "max_bias": 0.5,
        }
    )
    assert found.max_load_by_layer == pytest.approx({1: 3 * 4 / 8, 3: 9 * 3 / 16})
    assert found.counts is None
    assert record({}, []) is None


def test_choices_of_each_expert() -> None:
    found = record(EXPERTS, TOLD, counts=True)
    assert found is not None
    assert found.counts == {1: [3, 1, 2, 2], 3: [0, 7, 9]}
