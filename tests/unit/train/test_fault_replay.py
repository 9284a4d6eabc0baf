"""Replayed steps: what their results are taken for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from megapipe.config.health import HealthConfig
from megapipe.errors import ConfigError, DeviceFault
from megapipe.train.anomaly_detection import AnomalyDetector
from megapipe.train.fault_replay import FaultReplay, Outcome
from megapipe.train.step_stats import RankRequests, StepStats


def totals(loss: float, norm: float = 1.0, **given: Any) -> StepStats:
    return StepStats((norm * norm, 0.0), loss, 1, **given)


SOUND, OTHER, THIRD = totals(2.0), totals(2.0, 1.5), totals(2.25)
BAD, WORSE = totals(math.nan), totals(math.nan, math.inf)


def outcome(*results: StepStats, exact: bool = True, **settings: Any) -> tuple[Outcome, int]:
    """Return the outcome of a step with these successive results, and how many were asked for."""
    config = HealthConfig(**{"non_finite": "skip", **settings})
    left: Iterator[StepStats] = iter(results)
    rerun = FaultReplay(config, exact=exact, fault=AnomalyDetector(config).check)
    found = rerun.outcome(5, next(left), lambda: next(left))
    return found, len(results) - len(list(left))


def test_a_sound_step_is_computed_once() -> None:
    assert outcome(SOUND, OTHER) == (Outcome(SOUND, None), 1)
    assert outcome(SOUND, OTHER, replay_every=4)[1] == 1


def test_the_same_fault_again_is_persistent() -> None:
    found, computed = outcome(BAD, BAD)
    assert computed == 2
    assert found.fault is not None
    assert found.fault.action == "skip"
    assert found.fault.text.startswith("loss nan, gradient norm 1.0 ")
    assert found.fault.text.endswith(
        "with the same result: the cause is in data or weights, not in a device"
    )
    assert found.note is None
    alone, computed = outcome(BAD, replay=False)
    assert computed == 1
    assert alone.fault == AnomalyDetector(HealthConfig(non_finite="skip")).check(BAD)


def test_a_fault_that_is_gone_was_transient() -> None:
    """RankRequests of the first result stay: nobody is asked twice."""
    wished = totals(math.nan, requests=RankRequests(save=True))
    found, computed = outcome(wished, SOUND)
    assert computed == 2
    assert (found.totals.equals(SOUND), found.totals.requests.save) == (True, True)
    assert found.fault is None
    assert found.note is not None
    assert found.note.startswith("step 6: loss nan, ")
    assert found.note.endswith("a transient device fault, and the second result is used")


@pytest.mark.parametrize(
    ("exact", "words"),
    [(True, "a transient device fault affects both"), (False, "replayed with another anomaly")],
)
def test_another_fault_is_told_from_the_same_one(exact: bool, words: str) -> None:
    found, _ = outcome(BAD, WORSE, exact=exact)
    assert found.fault is not None
    assert found.fault.text.endswith(words)
    assert found.totals.equals(WORSE), "whose gradients there are"


def test_a_step_that_is_due_has_to_come_out_twice() -> None:
    every = {"replay_every": 3}
    assert outcome(SOUND, SOUND, OTHER, **every) == (Outcome(SOUND, None), 2)
    for results in ((SOUND, OTHER, SOUND), (SOUND, OTHER, OTHER)):
        found, computed = outcome(*results, **every)
        assert computed == 3
        assert found.totals.equals(results[-1])
        assert found.fault is None
        assert found.note is not None
        assert found.note.endswith("and the result that came twice is used")
    with pytest.raises(DeviceFault, match=r"^step 6: computed three times with three results "):
        outcome(SOUND, OTHER, THIRD, **every)


def test_what_is_not_exact_is_not_compared() -> None:
    with pytest.raises(
        ConfigError, match=r"expected run.deterministic=true, or health.replay_every=0"
    ):
        outcome(SOUND, exact=False, replay_every=1)


def test_totals_are_compared_to_the_bit() -> None:
    assert SOUND.equals(totals(2.0, memory_gib=3.0))
    assert not SOUND.equals(totals(math.nextafter(2.0, 3.0)))
    assert WORSE.equals(WORSE)
    assert not BAD.equals(SOUND)
