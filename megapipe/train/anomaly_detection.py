"""Detection of anomalies in a step's loss and gradient norm, and the action on an anomaly.

All ranks see the same totals, so they decide alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from megapipe.checkpoint.stateful import Stateful
from megapipe.config.health import Action, HealthConfig
from megapipe.errors import NumericError
from megapipe.text import count_noun
from megapipe.train.step_stats import StepStats

ADVICE = "lower optimizer.lr or resume from an earlier checkpoint"
NORMAL = 1.4826
"""Ratio of a normal distribution's standard deviation to its median absolute deviation."""
LEAST = 0.01
"""Lower bound of the assumed deviation, as a fraction of the median; for flat losses."""


class Anomaly(NamedTuple):
    """An anomaly of a step: a description of it, and the action that the section `health` sets."""

    text: str
    action: Action
    finite: bool = True


class BadStep(NumericError):
    """Error of a step with an anomaly. The step made no update, or an update that must be undone.

    `step` is the index, from 0, of the step whose samples caused the anomaly. `rewinds`: whether
    the run rewinds to a checkpoint. `finite`: whether loss and gradient norm are finite.
    """

    def __init__(self, text: str, step: int, *, rewinds: bool, finite: bool = False) -> None:
        super().__init__(text)
        self.step = step
        self.rewinds = rewinds
        self.finite = finite


class Spikes:
    """Detects values that stand out from the last `length` values of a series.

    A spike is above their median by more than `factor` standard deviations. The deviation is
    estimated from the median absolute deviation, so that a few outliers change little. Nothing is
    reported before there are `length` values. The caller must leave spikes out of the series.
    """

    def __init__(self, name: str, length: int, factor: float) -> None:
        self._name = name
        self._length = length
        self._factor = factor
        self.values: deque[float] = deque(maxlen=length)

    def fault(self, value: float) -> str | None:
        """Describe the finite number `value` if it is a spike; else return None."""
        if len(self.values) < self._length:
            return None
        median = statistics.median(self.values)
        spread = statistics.median(abs(value - median) for value in self.values)
        deviation = max(NORMAL * spread, LEAST * abs(median))
        if value - median <= self._factor * deviation:
            return None
        return (
            f"{self._name} {value:.6g} is a spike: the last {self._length} have a median of "
            f"{median:.6g} and a deviation of {deviation:.3g}"
        )

    def load(self, values: Iterable[float]) -> None:
        """Replace the series by the newest `length` of `values`."""
        self.values.clear()
        self.values.extend(values)


class AnomalyDetector(Stateful):
    """Detects anomalies in the steps of a run, and acts on them as the section `health` says."""

    name = "anomaly_state"
    kind = dict[str, JsonValue]

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._skipped = 0
        """Number of consecutive steps that were skipped because of anomalies."""
        factor, length = config.spike_factor, config.spike_window
        names = () if factor is None else ("loss", "gradient norm")
        self._spikes = [Spikes(name, length, factor or math.inf) for name in names]

    def check(self, totals: StepStats) -> Anomaly | None:
        """Return the anomaly of a step with `totals`; None if there is no anomaly."""
        if not totals.finite:
            return self.not_finite(
                f"loss {totals.loss}, gradient norm {totals.norm} ({totals.not_finite()}): "
                "not finite"
            )
        for spikes, value in zip(self._spikes, (totals.loss, totals.norm), strict=False):
            text = spikes.fault(value)
            if text is not None:
                return Anomaly(text, self._config.spike)
        return None

    def not_finite(self, text: str) -> Anomaly:
        """Return an anomaly for values that are not finite, with the description `text`."""
        return Anomaly(text, self._config.non_finite, finite=False)

    def record(self, totals: StepStats) -> None:
        """Record the totals of a step that has made an update."""
        self._skipped = 0
        for spikes, value in zip(self._spikes, (totals.loss, totals.norm), strict=False):
            spikes.values.append(value)

    def act(self, step: int, fault: Anomaly) -> str:
        """Take the configured action on the anomaly `fault` of step `step`, counted from 0. Return
        why the step's update is skipped, or raise :class:`BadStep` to stop or rewind."""
        message = f"step {step + 1}: {fault.text}"
        if fault.action == "stop":
            raise BadStep(f"{message}; {ADVICE}", step, rewinds=False, finite=fault.finite)
        if fault.action == "rewind":
            raise BadStep(message, step, rewinds=True, finite=fault.finite)
        self._skipped += 1
        if self._skipped > self._config.max_consecutive_skips:
            steps = count_noun(self._skipped, "step")
            raise BadStep(
                f"{message}; {steps} in a row, where "
                f"health.max_consecutive_skips={self._config.max_consecutive_skips}; {ADVICE}",
                step,
                rewinds=False,
                finite=fault.finite,
            )
        return fault.text

    def states_fault(self, updates: int, step: int, where: str | None) -> BadStep:
        """Return the error for an update that left non-finite values in the tensors `where`: update
        number `updates`, made by step `step`. Skipping a step cannot repair the tensors."""
        message = f"update {updates} made weights or optimizer states that are not finite"
        message += ", and is not saved" if where is None else f", in {where}, and is not saved"
        if self._config.non_finite == "rewind":
            return BadStep(message, step, rewinds=True)
        advice = (
            "lower optimizer.lr or optimizer.max_grad_norm, or resume from an earlier checkpoint"
        )
        return BadStep(f"{message}; {advice}", step, rewinds=False)

    def state(self) -> dict[str, JsonValue]:
        """Return the state for a checkpoint, as JSON."""
        return {"skipped": self._skipped, "series": [[*each.values] for each in self._spikes]}

    def load(self, stored: Mapping[str, JsonValue] | None) -> None:
        """Restore a result of :meth:`state`, without its series if spike detection is off now."""
        state = stored or {}
        skipped, series = state.get("skipped"), state.get("series")
        self._skipped = skipped if isinstance(skipped, int) else 0
        kept = series if isinstance(series, list) else []
        for number, spikes in enumerate(self._spikes):
            values = kept[number] if number < len(kept) else []
            found = values if isinstance(values, list) else []
            spikes.load(value for value in found if isinstance(value, float))
