"""Whether the numbers of a step can be right, and what is done where they cannot.

All ranks judge by the same totals, so they judge alike.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from megapipe.checkpoint.stateful import Stateful
from megapipe.config.numbers import Action, NumbersConfig
from megapipe.errors import NumericError
from megapipe.train.totals import StepStats
from megapipe.words import count_noun

ADVICE = "lower optimizer.lr or resume from an earlier checkpoint"
NORMAL = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""
LEAST = 0.01
"""Least deviation, as a share of the median: losses of a flat stretch differ by less."""


class Anomaly(NamedTuple):
    """The reason why the numbers of a step cannot be right, and what is to be done."""

    text: str
    action: Action
    finite: bool = True


class BadStep(NumericError):
    """A step must not be built upon: it has made no update, or one that has to be taken back.

    `step` is the one whose samples are to blame, counted from 0. `rewinds` says whether the run is
    to go back to a checkpoint, `finite` whether all numbers are finite all the same.
    """

    def __init__(self, text: str, step: int, *, rewinds: bool, finite: bool = False) -> None:
        super().__init__(text)
        self.step = step
        self.rewinds = rewinds
        self.finite = finite


class Spikes:
    """Tells which values stand out from the last `length` ones of a series.

    A spike is above their median by more than `factor` standard deviations, which are estimated
    from the median absolute deviation: neither is moved by a few wild values. None is told of
    before there are `length` values, and a spike is to be left out of the series.
    """

    def __init__(self, name: str, length: int, factor: float) -> None:
        self._name = name
        self._length = length
        self._factor = factor
        self.values: deque[float] = deque(maxlen=length)

    def fault(self, value: float) -> str | None:
        """Say that `value`, which is finite, is a spike; None: it is none."""
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
        """Go on from the last of these values."""
        self.values.clear()
        self.values.extend(values)


class AnomalyDetector(Stateful):
    """Judges the steps of a run, one after the other."""

    name = "judged"
    kind = dict[str, JsonValue]

    def __init__(self, config: NumbersConfig) -> None:
        self._config = config
        self._skipped = 0
        """Steps in a row that were made without an update, by the policy."""
        factor, length = config.spike_factor, config.spike_window
        names = () if factor is None else ("loss", "gradient norm")
        self._spikes = [Spikes(name, length, factor or math.inf) for name in names]

    def check(self, totals: StepStats) -> Anomaly | None:
        """Say what is wrong with a step of these totals; None: nothing."""
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
        """The fault of values that are not finite."""
        return Anomaly(text, self._config.non_finite, finite=False)

    def record(self, totals: StepStats) -> None:
        """Note the totals of a step that was made with an update."""
        self._skipped = 0
        for spikes, value in zip(self._spikes, (totals.loss, totals.norm), strict=False):
            spikes.values.append(value)

    def act(self, step: int, fault: Anomaly) -> str:
        """Act on a step, counted from 0, that has a fault: returns why it is to be made without an
        update, or raises :class:`BadStep`."""
        told = f"step {step + 1}: {fault.text}"
        if fault.action == "stop":
            raise BadStep(f"{told}; {ADVICE}", step, rewinds=False, finite=fault.finite)
        if fault.action == "rewind":
            raise BadStep(told, step, rewinds=True, finite=fault.finite)
        self._skipped += 1
        if self._skipped > self._config.most_skipped:
            steps = count_noun(self._skipped, "step")
            raise BadStep(
                f"{told}; {steps} in a row, where numbers.most_skipped="
                f"{self._config.most_skipped}; {ADVICE}",
                step,
                rewinds=False,
                finite=fault.finite,
            )
        return fault.text

    def states_fault(self, updates: int, step: int, where: str | None) -> BadStep:
        """The error where update number `updates`, that of `step`, has left values that are not
        finite, and `where`; skip cannot mend that."""
        told = f"update {updates} has left weights or optimizer states that are not finite"
        told += ", and is not saved" if where is None else f", in {where}, and is not saved"
        if self._config.non_finite == "rewind":
            return BadStep(told, step, rewinds=True)
        advice = "lower optimizer.lr or optimizer.clip, or resume from an earlier checkpoint"
        return BadStep(f"{told}; {advice}", step, rewinds=False)

    def state(self) -> dict[str, JsonValue]:
        """Its state for a checkpoint, as JSON takes it."""
        return {"skipped": self._skipped, "series": [[*each.values] for each in self._spikes]}

    def load(self, stored: Mapping[str, JsonValue] | None) -> None:
        """Go on from a :meth:`state`, as far as it has what is needed now."""
        state = stored or {}
        skipped, series = state.get("skipped"), state.get("series")
        self._skipped = skipped if isinstance(skipped, int) else 0
        kept = series if isinstance(series, list) else []
        for number, spikes in enumerate(self._spikes):
            values = kept[number] if number < len(kept) else []
            found = values if isinstance(values, list) else []
            spikes.load(value for value in found if isinstance(value, float))
