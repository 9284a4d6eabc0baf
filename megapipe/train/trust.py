"""Optimizer steps taken on trust, and validated while the next step begins.

Clipping needs the global gradient norm, so every rank would wait at the end of a step until the
slowest one is there: a barrier that undoes what a schedule without bubbles has gained (Qi et al.,
2401.10241, section 4). Here a rank updates its weights as soon as its own gradients are reduced, if
nothing that it has seen itself forbids that, and begins the next step. Meanwhile the norms are
exchanged along the pipeline. Before the first backward all ranks look at the same sum: if it asks
for clipping, or is not finite, they give up what they have begun, take back the update to the last
bit, make the right one, and begin again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megapipe.engine.executor import Executor
from megapipe.train.feed import Rows
from megapipe.train.totals import Totals

if TYPE_CHECKING:
    from megapipe.train.step import StepResult, TrainStep


class _Taken(NamedTuple):
    """A step whose update has not been validated."""

    step: int
    totals: Callable[[], Tensor]
    """Waits for the totals of all pipeline ranks."""
    scaler: dict[str, float]
    """The loss scale's state before it."""


class Trust:
    """Trains with validation after the fact; used by one :class:`TrainStep`."""

    def __init__(self, train_step: TrainStep) -> None:
        self._train_step = train_step
        self._taken: _Taken | None = None
        self.undone = 0
        """Updates that were taken back, or held back, so far."""

    @property
    def open(self) -> bool:
        """Whether a step is still to be validated."""
        return self._taken is not None

    def train(
        self, executor: Executor, step: int, rows: Rows, stop: Callable[[], bool]
    ) -> StepResult | None:
        """Step `step`; returns the result of the one before."""
        own = self._train_step
        microbatches, tokens = own.fetch(step, rows)
        executor.open(microbatches)
        result, held = self._validate()
        if not held:
            executor.give_up()
            microbatches, tokens = own.fetch(step, rows)
            executor.open(microbatches)
        own.optimizer.zero_grad()
        executor.go_on()
        self._take(step, own.own_totals(tokens, stop))
        return result

    def settle(self) -> StepResult | None:
        """Validate the last step."""
        result, _ = self._validate()
        return result

    def _take(self, step: int, totals: Totals) -> None:
        """Update by what this pipeline rank and its replicas know."""
        own = self._train_step
        vector = own.mesh.ordered_sum(totals.pack(), "tp", "cp", "dp")
        self._taken = _Taken(step, own.mesh.start_ordered_sum(vector, "pp"), own.scaler.state())
        here = Totals.unpack(vector)
        own.optimizer.keep()
        if self._is_plain(here):
            own.optimizer.update(own.lr(step))
            own.scaler.update(finite=True)
        else:
            own.optimizer.publish_shared()

    def _is_plain(self, totals: Totals) -> bool:
        """Whether an update by these gradients neither clips nor skips.

        Adding ranks never makes a norm smaller: what a part forbids, the whole does.
        """
        return totals.finite and self._train_step.clipping(totals) == 1.0

    def _validate(self) -> tuple[StepResult | None, bool]:
        """The result of the step that is open, and whether its update held."""
        if self._taken is None:
            return None, True
        own = self._train_step
        (step, totals_of, scaler), self._taken = self._taken, None
        totals = Totals.unpack(totals_of())
        after = own.scaler.state()
        own.scaler.load(scaler)
        if self._is_plain(totals):
            result = own.result(step, totals)
            own.scaler.load(after)
            return result, True
        self.undone += 1
        own.optimizer.undo()
        return own.apply(step, totals), False
