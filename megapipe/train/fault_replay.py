"""Replay of steps, to tell a device fault from bad data or weights.

Loss and gradients of a step depend only on weights, samples and seeds. These still exist before the
update, so the step can be repeated bitwise. If loss and gradient norm are the same again, the cause
of an anomaly is in weights or samples: every device computes it. If they differ, a device once
computed or stored a value wrongly: a transient device fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megapipe.config.health import HealthConfig
from megapipe.errors import ConfigError, DeviceFault
from megapipe.train.anomaly_detection import Anomaly
from megapipe.train.step_stats import StepStats

Replay = Callable[[], StepStats]
"""Function that replays a step up to its gradients, and returns the totals over all ranks."""


class Outcome(NamedTuple):
    """The totals to use for a step after its replays. The gradients in memory have these totals."""

    totals: StepStats
    fault: Anomaly | None
    """Anomaly of `totals`, if any."""
    note: str | None = None
    """A line to print."""


class FaultReplay:
    """Decides which steps are replayed, and the consequences, equally on all ranks.

    `exact`: equal computations give equal bits on this device. `fault` returns the anomaly of given
    totals, or None. Raises :class:`ConfigError` if ``health.replay_every`` is set, but `exact` is
    False.
    """

    def __init__(
        self, config: HealthConfig, *, exact: bool, fault: Callable[[StepStats], Anomaly | None]
    ) -> None:
        self._config = config
        self._exact = exact
        self._fault = fault
        if config.replay_every and not exact:
            raise ConfigError(
                f"health.replay_every={config.replay_every} compares two computations "
                "bitwise: expected run.deterministic=true, or health.replay_every=0"
            )

    def due(self, step: int) -> bool:
        """Whether `step`, counted from 0, is replayed even without an anomaly."""
        every = self._config.replay_every
        return every > 0 and (step + 1) % every == 0

    def outcome(self, step: int, totals: StepStats, replay: Replay) -> Outcome:
        """Replay a step if due, or if it has an anomaly. Return the totals to use.

        Raises :class:`DeviceFault` if three computations of a step without anomaly all differ.
        """
        fault = self._fault(totals)
        if fault is not None and self._config.replay:
            return self._suspected(step, totals, fault, _repeated(replay, totals))
        if fault is None and self.due(step):
            return self._due(step, totals, replay)
        return Outcome(totals, fault)

    def _suspected(
        self, step: int, totals: StepStats, fault: Anomaly, second: StepStats
    ) -> Outcome:
        another = self._fault(second)
        if another is None:
            return Outcome(
                second,
                None,
                f"step {step + 1}: {fault.text}; replayed: {_figures(second)}: a transient "
                "device fault, and the second result is used",
            )
        if totals.equals(second):
            finding = (
                "replayed with the same result: the cause is in data or weights, not in a device"
            )
        elif self._exact:
            finding = "replayed with another bad result: a transient device fault affects both"
        else:
            finding = "replayed with another anomaly"
        return Outcome(second, another._replace(text=f"{fault.text}; {finding}"))

    def _due(self, step: int, totals: StepStats, replay: Replay) -> Outcome:
        second = _repeated(replay, totals)
        if totals.equals(second):
            return Outcome(second, self._fault(second))
        third = _repeated(replay, totals)
        results = "; ".join(map(_figures, (totals, second, third)))
        if not (third.equals(totals) or third.equals(second)):
            raise DeviceFault(
                f"step {step + 1}: computed three times with three results ({results}): a "
                "device is faulty; the step is not saved"
            )
        return Outcome(
            third,
            self._fault(third),
            f"step {step + 1}: computed three times ({results}): a transient device fault, "
            "and the result that came twice is used",
        )


def _repeated(replay: Replay, totals: StepStats) -> StepStats:
    """Repeat a step with `replay`. Return its new totals, with the requests in the old `totals`."""
    return replace(replay(), requests=totals.requests)


def _figures(totals: StepStats) -> str:
    return f"loss {totals.loss:.9g}, gradient norm {totals.norm:.9g}"
