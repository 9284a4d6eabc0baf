"""``log.timeline``: when each operation of a step ran, drawn next to its simulation."""

from __future__ import annotations

from megapipe.engine.recorder import timeline
from megapipe.observe.timeline import write_timeline
from megapipe.train.callbacks.callback import Callback, Run, Step


class Timelines(Callback):
    """Draws the steps that the configuration names."""

    def before_step(self, run: Run, step: Step) -> None:
        step.record |= step.number in run.config.log.timeline

    def after_step(self, run: Run, step: Step) -> None:
        if step.number not in run.config.log.timeline:
            return
        records = run.train_step.records()
        if run.mesh.rank != 0:
            return
        try:
            measured = timeline(run.train_step.schedule, records)
            run.note(write_timeline(run.folder, step.number, measured, run.layout.cost))
        except OSError as error:
            run.note(f"no timeline of step {step.number}: {error}")
