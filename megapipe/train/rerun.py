"""Steps that are computed a second time, to tell a fault of a device from one of data and weights.

Before the update a step is a function of weights, samples and seeds, which are all still there, so
it can be repeated to the bit. The same numbers again are persistent: whoever computes them gets
them. Other numbers are transient: a device has computed or kept something wrongly, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megapipe.config.numbers import NumbersConfig
from megapipe.errors import ConfigError, DeviceFault
from megapipe.train.judge import Anomaly
from megapipe.train.totals import StepStats

Again = Callable[[], StepStats]
"""Computes the gradients of a step once more, and returns their totals of all ranks."""


class Outcome(NamedTuple):
    """The numbers of a step that are to be gone by, which are those of the gradients there are."""

    totals: StepStats
    fault: Anomaly | None
    """The reason why they cannot be right either."""
    note: str | None = None
    """A line for the user."""


class FaultReplay:
    """Decides which steps are computed again, and what follows from that, alike on all ranks.

    `exact` says that equal computations give equal bits here; `fault` what is wrong with a step.
    Raises :class:`ConfigError` for comparisons that would need that and do not have it.
    """

    def __init__(
        self, config: NumbersConfig, *, exact: bool, fault: Callable[[StepStats], Anomaly | None]
    ) -> None:
        self._config = config
        self._exact = exact
        self._fault = fault
        if config.rerun_every and not exact:
            raise ConfigError(
                f"numbers.rerun_every={config.rerun_every} compares what is computed twice to the "
                "bit: expected run.deterministic=true, or 0"
            )

    def due(self, step: int) -> bool:
        """Whether `step`, counted from 0, is computed again though nothing is wrong with it."""
        every = self._config.rerun_every
        return every > 0 and (step + 1) % every == 0

    def outcome(self, step: int, totals: StepStats, again: Again) -> Outcome:
        """Compute a step again where that is due or it has a fault.

        Raises :class:`DeviceFault` where a step without a fault comes out otherwise each time.
        """
        fault = self._fault(totals)
        if fault is not None and self._config.rerun:
            return self._suspected(step, totals, fault, _repeated(again, totals))
        if fault is None and self.due(step):
            return self._due(step, totals, again)
        return Outcome(totals, fault)

    def _suspected(
        self, step: int, totals: StepStats, fault: Anomaly, second: StepStats
    ) -> Outcome:
        another = self._fault(second)
        if another is None:
            return Outcome(
                second,
                None,
                f"step {step + 1}: {fault.text}; computed again: {_told(second)}: a transient "
                "fault of a device, and the second result is used",
            )
        if totals.equals(second):
            told = "computed again with the same result: persistent, of data and weights"
        elif self._exact:
            told = "computed again with another result: a transient fault of a device is in both"
        else:
            told = "computed again, it cannot be right either"
        return Outcome(second, another._replace(text=f"{fault.text}; {told}"))

    def _due(self, step: int, totals: StepStats, again: Again) -> Outcome:
        second = _repeated(again, totals)
        if totals.equals(second):
            return Outcome(second, self._fault(second))
        third = _repeated(again, totals)
        results = "; ".join(map(_told, (totals, second, third)))
        if not (third.equals(totals) or third.equals(second)):
            raise DeviceFault(
                f"step {step + 1}: computed three times with three results ({results}): a device "
                "is at fault; the step is not saved"
            )
        return Outcome(
            third,
            self._fault(third),
            f"step {step + 1}: computed three times ({results}): a transient fault of a device, "
            "and the result that came twice is used",
        )


def _repeated(again: Again, totals: StepStats) -> StepStats:
    """The totals of the step once more, with the wishes that ranks had the first time."""
    return replace(again(), wishes=totals.wishes)


def _told(totals: StepStats) -> str:
    return f"loss {totals.loss:.9g}, gradient norm {totals.norm:.9g}"
