"""Copies of values that several ranks hold are compared every so many steps, and before a save."""

from __future__ import annotations

from megapipe.errors import DeviceFault
from megapipe.optim.copies import ReplicaCheck
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.validation import is_due


class ReplicaCheckCallback(Callback):
    """Ends the run where copies differ; to come before validation and saving."""

    def __init__(self) -> None:
        self._copies: ReplicaCheck | None = None

    def before_step(self, run: Run, step: Step) -> None:
        step.settle |= is_due(run.config.numbers.check_copies_every, step.number)

    def after_step(self, run: Run, step: Step) -> None:
        """Raises :class:`DeviceFault` on all ranks."""
        if not (step.settle or step.save or step.stop):
            return
        run.check_settled()
        if self._copies is None or run.config.experts.copies:
            self._copies = ReplicaCheck(run.train_step.optimizer, run.mesh)
        difference = self._copies.first_mismatch()
        if difference is not None:
            raise DeviceFault(
                f"step {step.number}: {difference}, though they are copies of one value: memory or "
                "arithmetic of a device is at fault; the step is not saved: start again from the "
                "checkpoint before, without that device if this happens again"
            )
