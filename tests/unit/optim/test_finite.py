"""Values that are not finite are noticed wherever they are, and large ones are no mistake."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megapipe.optim.norm import zero_if_finite
from megapipe.optim.state_store import StatePolicy, StateStore

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NAMES = ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_counts(dtype: torch.dtype) -> None:
    first, second = torch.ones(1001, dtype=dtype), torch.ones(7, dtype=dtype)
    largest = torch.finfo(dtype).max
    first[:500], second[-1] = largest, -largest
    assert zero_if_finite([first, second]) == 0.0, "though sums overflow"
    for values, at in ((first, 0), (first, 1000), (second, 3)):
        for wrong in (math.nan, math.inf, -math.inf):
            before, values[at] = values[at].item(), wrong
            assert math.isnan(zero_if_finite([first, second]))
            values[at] = before
    first[:2] = torch.tensor([math.inf, -math.inf])
    assert math.isnan(zero_if_finite([first]))


@pytest.mark.parametrize("place", ["device", "disk"])
@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_store_knows_what_an_update_has_left(wrong: int, place: str, tmp_path: Path) -> None:
    """An update leaves it in master or states, in one window or several; each begins anew."""
    policy = StatePolicy(place=place, folder=tmp_path, window_bytes=20)  # type: ignore[arg-type]
    store = StateStore(torch.ones(3000, dtype=torch.bfloat16), NAMES, policy)
    for step, (value, expected) in enumerate([(1.0, 0.0), (math.inf, math.nan), (2.0, 0.0)]):
        store.begin(step)
        for window in store.windows(0, 3000):
            if window.start <= 10 < window.stop:
                (window.master, *window.states)[wrong][10 - window.start] = value
        assert store.finite == pytest.approx(expected, nan_ok=True)


def test_weights_that_hold_less_than_their_master(tmp_path: Path) -> None:
    store = StateStore(torch.ones(8, dtype=torch.float16), NAMES)
    store.begin(0)
    for window in store.windows(0, 8):
        window.master[3] = 70_000.0
    assert math.isnan(store.finite)


def test_what_is_undone_is_finite_again() -> None:
    store = StateStore(torch.ones(8), NAMES)
    store.snapshot()
    store.begin(0)
    for window in store.windows(0, 8):
        window.states[0][3] = math.nan
    assert math.isnan(store.finite)
    store.restore()
    assert store.finite == 0.0
