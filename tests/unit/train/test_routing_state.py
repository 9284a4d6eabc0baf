"""What routing keeps from step to step, by itself."""

from __future__ import annotations

import pytest
import torch

from megapipe.train.moe.routing_state import RoutingState
from tests.parity.in_memory_models import HeldWeights

EXPERTS = {1: 4, 3: 3}
TOLD = [8.0, 8.0, 1.0, 0.0, *(3, 1, 2, 2), 8.0, 9.0, 1.0, 2.0, *(0, 7, 9)]
"""Four numbers of each layer, and the choices of each of its experts."""


def test_biases_move_towards_the_mean_of_their_layer() -> None:
    state = RoutingState(EXPERTS, bias_rate=0.5)
    assert state.max_bias == 0
    state.update(TOLD)
    assert state.biases[1].tolist() == [-0.5, 0.5, 0, 0]
    assert state.biases[3].tolist() == [0.5, -0.5, -0.5]
    state.update(TOLD)
    assert state.biases[1].tolist() == [-1, 1, 0, 0]
    assert state.max_bias == 1


@pytest.mark.parametrize("here", [[], [1], [1, 3]])
def test_what_moves_ahead_moves_once(here: list[int]) -> None:
    """The layers here first, all of them when the update holds; nothing where it is undone."""
    known = [([layer], TOLD) for layer in here]
    waits, ahead = (RoutingState(EXPERTS, bias_rate=0.5, counts=True) for _ in range(2))
    for step in range(3):
        ahead.snapshot()
        ahead.update_speculatively(known)
        for layer, bias in ahead.biases.items():
            assert bias.any() == (step > 0 or layer in here)
        if step == 1:
            ahead.restore()
        else:
            waits.update(TOLD)
            ahead.confirm(TOLD)
        for one, other in zip(waits.tensors(), ahead.tensors(), strict=True):
            assert one.tensor.equal(other.tensor), (step, one.name)


@pytest.mark.parametrize("rate", [None, 0.0])
def test_without_a_rate_nothing_moves(rate: float | None) -> None:
    state = RoutingState(EXPERTS, bias_rate=rate)
    state.update(TOLD)
    assert state.max_bias == rate
    assert len(state.entries()) == (0 if rate is None else 2)


def test_choices_of_a_step_are_kept_and_spread_evenly_at_first() -> None:
    state = RoutingState(EXPERTS, counts=True)
    assert {layer: counts.tolist() for layer, counts in state.counts.items()} == {
        1: [1] * 4,
        3: [1] * 3,
    }
    state.update(TOLD)
    assert state.counts[1].tolist() == [3, 1, 2, 2]
    assert state.counts[3].tolist() == [0, 7, 9]
    assert state.max_bias is None
    names = ["routing/layers.1.moe.router.counts", "routing/layers.3.moe.router.counts"]
    assert state.entries() == names
    held = HeldWeights({piece.name: piece.tensor.clone() for piece in state.tensors()})
    state.read(held, ())
    assert state.counts[3].tolist() == [1, 1, 1], "weights alone have no counts"
    state.read(held, names)
    assert state.counts[3].tolist() == [0, 7, 9]


def test_first_choices_are_kept_where_they_are_told() -> None:
    """Biases move by all choices, whatever is kept; kept are those that are told last. What another
    run has kept of all choices is not taken for them."""
    told = [*TOLD[:8], *(0, 1, 2, 1), *TOLD[8:], *(0, 5, 3)]
    state = RoutingState(EXPERTS, bias_rate=0.5, counts=True, first_only=True)
    state.update(told)
    assert state.counts[1].tolist() == [0, 1, 2, 1]
    assert state.counts[3].tolist() == [0, 5, 3]
    assert state.biases[1].tolist() == [-0.5, 0.5, 0, 0]
    assert state.biases[3].tolist() == [0.5, -0.5, -0.5]
    other = RoutingState(EXPERTS, bias_rate=0.5, counts=True)
    other.update(TOLD)
    for own in (state, other):
        held = {p.name.removeprefix("model/"): p.tensor.clone() for p in own.tensors()}
        again = RoutingState(EXPERTS, bias_rate=0.5, counts=True, first_only=True)
        again.read(HeldWeights(held), held)
        assert again.counts[3].tolist() == ([0, 5, 3] if own is state else [1, 1, 1])
        assert again.biases[3].equal(own.biases[3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_saved_and_loaded(dtype: torch.dtype) -> None:
    state = RoutingState(EXPERTS, bias_rate=0.1, dtype=dtype)
    state.update(TOLD)
    pieces = list(state.tensors())
    assert [piece.name for piece in pieces] == state.entries()
    assert [piece.name for piece in pieces] == [
        "model/layers.1.moe.router.bias",
        "model/layers.3.moe.router.bias",
    ]
    held = HeldWeights({p.name.removeprefix("model/"): p.tensor.clone() for p in pieces})
    again = RoutingState(EXPERTS, bias_rate=0.1, dtype=dtype)
    again.read_weights(held)
    for layer, bias in state.biases.items():
        assert bias.dtype == dtype
        assert again.biases[layer].equal(bias)
