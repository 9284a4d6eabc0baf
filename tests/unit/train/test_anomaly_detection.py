"""Which values of a step are anomalies, and what follows from that."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megapipe.config.health import HealthConfig
from megapipe.train.anomaly_detection import Anomaly, AnomalyDetector, BadStep, Spikes
from megapipe.train.step_stats import StepStats


def judge(**settings: Any) -> AnomalyDetector:
    return AnomalyDetector(HealthConfig(**settings))


def totals(loss: float, norm: float = 1.0) -> StepStats:
    return StepStats((norm * norm, 0.0), loss, 1)


WILD = [5.0, 4.0, 6.0, 1e9, 5.5]
"""Values of median 5.5, from which the median distance is 0.5."""


def test_a_spike_is_above_the_median_by_so_many_deviations() -> None:
    spikes = Spikes("loss", 5, factor=10.0)
    limit = 5.5 + 10 * 1.4826 * 0.5
    for value in WILD:
        assert spikes.fault(1e30) is None, "there are too few to tell"
        spikes.values.append(value)
    for fine in (limit - 1e-9, 5.5, -1e30):
        assert spikes.fault(fine) is None
    text = spikes.fault(limit + 1e-9)
    assert text == (
        "loss 12.913 is a spike: the last 5 have a median of 5.5 and a deviation of 0.741"
    )
    spikes.values.append(4.0)
    assert list(spikes.values) == [*WILD[1:], 4.0], "the oldest has gone"


def test_losses_that_stand_still_have_a_deviation_all_the_same() -> None:
    spikes = Spikes("loss", 4, factor=3.0)
    spikes.load([2.0] * 9)
    assert spikes.fault(2.0 + 3 * 0.02 - 1e-9) is None
    assert spikes.fault(2.0 + 3 * 0.02 + 1e-9) is not None


def test_loss_and_norm_are_looked_at_one_by_one() -> None:
    watching = judge(spike_factor=5.0, spike_window=4)
    for _ in range(4):
        assert watching.check(totals(1e9, 1e9)) is None
        watching.record(totals(2.0, 1.0))
    assert watching.check(totals(2.0, 1.0)) is None
    for value, name in ((totals(3.0, 1.0), "loss 3 "), (totals(2.0, 2.0), "gradient norm 2 ")):
        fault = watching.check(value)
        assert fault is not None
        assert fault.text.startswith(name)
        assert fault.action == "rewind"
    again = judge(spike_factor=5.0, spike_window=4)
    again.load(json.loads(json.dumps(watching.state())))
    assert again.check(totals(3.0, 1.0)) is not None
    again.load({})
    assert again.check(totals(3.0, 1.0)) is None
    assert judge().state()["series"] == []


def test_what_is_done_about_a_fault() -> None:
    with pytest.raises(BadStep, match=r"^step 3: why; lower optimizer.lr") as stopped:
        judge().act(2, Anomaly("why", "stop"))
    assert (stopped.value.step, stopped.value.rewinds) == (2, False)
    with pytest.raises(BadStep, match=r"^step 3: why$") as rewound:
        judge().act(2, Anomaly("why", "rewind"))
    assert (rewound.value.step, rewound.value.rewinds) == (2, True)
    skipping = judge(max_consecutive_skips=2)
    for _ in range(2):
        assert skipping.act(2, Anomaly("why", "skip")) == "why"
    later = judge(max_consecutive_skips=2)
    later.load(json.loads(json.dumps(skipping.state())))
    skipping.record(totals(1.0))
    assert skipping.act(2, Anomaly("why", "skip")) == "why"
    with pytest.raises(BadStep, match=r"3 steps in a row, where health.max_consecutive_skips=2"):
        later.act(2, Anomaly("why", "skip"))


@pytest.mark.parametrize("policy", ["stop", "skip", "rewind"])
def test_states_that_are_not_finite_are_never_skipped(policy: str) -> None:
    unsound = judge(non_finite=policy).states_fault(4, 2, "w on rank 1")
    assert unsound.rewinds is (policy == "rewind")
    told = "update 4 made weights or optimizer states that are not finite, in w on rank 1, and"
    assert str(unsound).startswith(told)


def test_values_that_are_not_finite_are_no_spike() -> None:
    fault = judge(non_finite="skip", spike_factor=1.0).check(totals(math.nan))
    assert fault is not None
    assert fault.action == "skip"
    assert fault.text.endswith("(gradients of no stage): not finite")
