"""The learning rate over a run: its ends, its shape, and where its parts meet."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.config import OptimizerConfig
from megapipe.optim.lr import learning_rate

DECAYING = ("cosine", "linear", "wsd")


def rates(steps: int, **settings: object) -> list[float]:
    config = OptimizerConfig.model_validate({"lr": 1.0, "min_lr": 0.1, **settings})
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", [*DECAYING, "constant"])
def test_warm_up_is_linear_and_reaches_the_peak(schedule: str) -> None:
    values = rates(20, warmup_steps=4, schedule=schedule)
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates(20, warmup_steps=0, schedule=schedule)[0] == 1.0


@pytest.mark.parametrize("schedule", DECAYING)
def test_the_last_step_has_the_least_rate(schedule: str) -> None:
    values = rates(20, warmup_steps=4, schedule=schedule)
    assert values[-1] == pytest.approx(0.1)
    assert values[-2] > 0.1


def test_cosine_is_half_way_down_in_the_middle() -> None:
    values = rates(15, warmup_steps=4, schedule="cosine")
    assert values[9] == pytest.approx(0.55)
    assert values[5] == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi * 0.1)))


def test_linear_falls_by_the_same_amount_each_step() -> None:
    values = rates(15, warmup_steps=4, schedule="linear")
    falls = [a - b for a, b in itertools.pairwise(values[4:])]
    assert falls == pytest.approx([0.09] * 10)


def test_wsd_holds_the_peak_until_the_last_decay_steps() -> None:
    values = rates(30, warmup_steps=4, schedule="wsd", decay_steps=5)
    assert values[4:25] == [1.0] * 21
    assert values[25:] == pytest.approx([0.82, 0.64, 0.46, 0.28, 0.1])
    tenth = rates(100, warmup_steps=4, schedule="wsd")
    assert [i for i, value in enumerate(tenth) if value < 1.0 and i > 4] == list(range(90, 100))


def test_a_short_decay_stays_at_the_end_rate() -> None:
    values = rates(30, warmup_steps=4, schedule="cosine", decay_steps=10)
    assert values[14:] == pytest.approx([0.1] * 16)
    assert values[13] > 0.11


def test_constant_stays() -> None:
    assert rates(30, warmup_steps=4, schedule="constant")[4:] == [1.0] * 26


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, dict[str, object]]:
    """Draw steps and settings that a configuration allows: warm-up and decay fit into the run."""
    schedule = draw(st.sampled_from([*DECAYING, "constant"]))
    steps = draw(st.integers(1, 200))
    decay = draw(st.none() | st.integers(1, steps))
    least = max(1, steps // 10) if schedule == "wsd" else 1
    room = steps - (decay or least)
    warmup = draw(st.integers(0, room) | st.none())
    return steps, {"schedule": schedule, "warmup_steps": warmup, "decay_steps": decay}


@given(runs())
def test_rates_rise_then_fall_between_their_bounds(run: tuple[int, dict[str, object]]) -> None:
    steps, settings = run
    values = rates(steps, **settings)
    peak = values.index(max(values))
    assert all(0 < value <= 1.0 for value in values)
    assert values[:peak] == sorted(values[:peak])
    assert values[peak:] == sorted(values[peak:], reverse=True)
    assert min(values[peak:]) >= 0.1 - 1e-12
    assert peak <= OptimizerConfig.model_validate(settings).warmup(steps)


@pytest.mark.parametrize(
    ("settings", "steps", "warmup"),
    [
        ({"warmup_steps": 1}, 300, 1),
        ({"warmup_steps": 0.02}, 300, 6),
        ({"warmup_steps": 0.07}, 100, 7),
        ({"warmup_steps": 0.0}, 300, 0),
        ({"warmup_steps": 0.001}, 300, 0),
        ({}, 101, 100),
        ({}, 100, 10),
        ({}, 1, 0),
        ({"schedule": "constant"}, 100, 100),
        ({"schedule": "constant"}, 99, 9),
        ({"schedule": "wsd"}, 112, 100),
        ({"schedule": "wsd"}, 109, 10),
        ({"decay_steps": 200}, 300, 100),
        ({"decay_steps": 201}, 300, 30),
        ({"decay_steps": 299}, 300, 1),
    ],
)
def test_warm_up_in_steps(settings: dict[str, object], steps: int, warmup: int) -> None:
    config = OptimizerConfig.model_validate(settings)
    assert config.warmup(steps) == warmup
    assert learning_rate(config, warmup, steps) == config.lr
    if warmup:
        assert learning_rate(config, warmup - 1, steps) < config.lr
