"""Check that replicas of weights and states are equal, at given steps and before each save."""

from __future__ import annotations

from megapipe.errors import DeviceFault
from megapipe.optim.replica_check import ReplicaCheck
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.validation import is_due


class ReplicaCheckCallback(Callback):
    """Ends the run if replicas differ; called before validation and saving."""

    def __init__(self) -> None:
        self._copies: ReplicaCheck | None = None

    def before_step(self, run: Run, step: Step) -> None:
        step.settle |= is_due(run.config.health.replica_check_every, step.number)

    def after_step(self, run: Run, step: Step) -> None:
        """Compare replicas after a settled step; raises :class:`DeviceFault` on all ranks."""
        if not (step.settle or step.save or step.stop):
            return
        run.check_settled()
        if self._copies is None or run.config.experts.copies:
            self._copies = ReplicaCheck(run.train_step.optimizer, run.mesh)
        difference = self._copies.first_mismatch()
        if difference is not None:
            raise DeviceFault(
                f"step {step.number}: {difference}, but replicas of a value must be equal: a "
                "device is faulty. The step is not saved: restart from the checkpoint before, "
                "and without that device if it happens again"
            )
