"""The loss scale of fp16: when it moves, when a step is skipped, when there is nothing left."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megapipe.config.config import OptimizerConfig
from megapipe.errors import NumericError
from megapipe.optim.loss_scaler import FIRST, LARGEST, LossScaler


def scaler(**settings: Any) -> LossScaler:
    return LossScaler(OptimizerConfig.model_validate(settings), "fp16")


def test_it_halves_on_a_bad_gradient_and_doubles_after_a_window_of_good_ones() -> None:
    s = scaler(loss_scale_window=3)
    assert s.scale == FIRST == 65536
    seen = []
    for finite in (False, False, True, True, False, True, True, True, True):
        made = s.update(finite=finite)
        assert made == finite
        seen.append(s.scale / FIRST)
    assert seen == [0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.25, 0.25]


def test_it_grows_to_a_largest_value() -> None:
    s = scaler(loss_scale_window=1)
    for _ in range(30):
        s.update(finite=True)
    assert s.scale == LARGEST


def test_skipping_for_ever_is_an_error() -> None:
    s = scaler()
    for _ in range(16):
        assert not s.update(finite=False)
    assert s.scale == 1
    with pytest.raises(NumericError, match=r"not finite at loss scale 1, the smallest.*bf16"):
        s.update(finite=False)


def test_a_fixed_scale_stays_and_cannot_help() -> None:
    s = scaler(loss_scale=1024.0, loss_scale_window=1)
    assert s.update(finite=True)
    assert s.scale == 1024
    with pytest.raises(NumericError, match=r"fixed loss scale 1024.*optimizer\.loss_scale"):
        s.update(finite=False)
    s.load({"scale": 2.0, "good_steps": 0})
    assert s.scale == 1024


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_other_types_have_none(dtype: Any) -> None:
    s = LossScaler(OptimizerConfig(loss_scale=8.0, loss_scale_window=1), dtype)
    assert s.update(finite=True)
    assert s.scale == 1
    with pytest.raises(NumericError):
        s.update(finite=False)


def test_a_state_that_was_saved_goes_on_as_if_nothing_had_been() -> None:
    pattern = [True, False, True, True, True, True, False, True, True, True]
    plain, s = scaler(loss_scale_window=2), scaler(loss_scale_window=2)
    for finite in pattern:
        plain.update(finite=finite)
        s.update(finite=finite)
        state = json.loads(json.dumps(s.state()))
        s = scaler(loss_scale_window=2)
        s.load(state)
        assert (s.scale, s.good_steps) == (plain.scale, plain.good_steps)


def test_a_shorter_window_than_the_saved_one_still_ends() -> None:
    s = scaler(loss_scale_window=5)
    s.load({"scale": 64.0, "good_steps": 100})
    s.update(finite=True)
    assert s.scale == 128


@pytest.mark.parametrize(
    "state",
    [
        {"good_steps": 0.0},
        {"scale": 1.0},
        {"scale": 1.0, "good_steps": 0.5},
        {"scale": float("nan"), "good_steps": 0},
        {"scale": 0.0, "good_steps": 0},
        {"scale": 2.0**60, "good_steps": 0},
        {"scale": 2.0, "good_steps": -1},
    ],
)
def test_a_state_that_is_none_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="the loss scale's state is"):
        scaler().load(state)
