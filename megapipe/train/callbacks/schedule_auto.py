"""``pipeline.schedule: auto`` in the loop of a run; :mod:`megapipe.train.auto` does the work."""

from __future__ import annotations

from megapipe.train.auto import AutoSchedule
from megapipe.train.callbacks.callback import Callback, Run, Step


class ScheduleAuto(Callback):
    """Times and records steps, then switches the run to a schedule searched for their costs.

    With `resumed`, the schedule in the run folder is used.
    """

    def __init__(self, *, resumed: bool) -> None:
        self._resumed = resumed

    def begin(self, run: Run) -> None:
        self._auto = AutoSchedule(
            run.config,
            run.layout,
            run.train_step,
            run.mesh,
            run.folder,
            run.note,
            resumed=self._resumed,
        )

    def before_step(self, run: Run, step: Step) -> None:
        step.record |= self._auto.recording

    def after_step(self, run: Run, step: Step) -> None:
        (result,) = step.results  # without post-validation, which excludes this
        self._auto.after(result.seconds, recorded=step.record)
