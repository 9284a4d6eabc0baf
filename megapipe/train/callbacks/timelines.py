"""``log.timeline``: when each operation of a step ran, drawn next to its simulation.

In a no-flush pipeline a step overlaps with its neighbours. So the neighbours are recorded too, and
the step is drawn when all of them are done.
"""

from __future__ import annotations

from megapipe.engine.recorder import timeline
from megapipe.observe.timeline import write_timeline, write_window
from megapipe.train.callbacks.callback import Callback, Run, Step


class Timelines(Callback):
    """Draws the steps that ``log.timeline`` lists."""

    def before_step(self, run: Run, step: Step) -> None:
        streaming = run.train_step.streaming
        for number in run.config.log.timeline:
            if streaming is None:
                step.record |= step.number == number
            else:
                step.record |= number - 1 <= step.number <= number + streaming.recording.after

    def after_step(self, run: Run, step: Step) -> None:
        for number in sorted(run.config.log.timeline):
            if self._is_known(run, step, number):
                self._draw(run, number)

    def _is_known(self, run: Run, step: Step, number: int) -> bool:
        """Whether step `number` and all neighbours in its timeline are complete after `step`."""
        streaming = run.train_step.streaming
        if streaming is None:
            return step.number == number
        end = number + streaming.recording.after
        ends = end == step.number or (step.last and number <= step.number < end)
        return ends and number > run.first_step

    def _draw(self, run: Run, number: int) -> None:
        train_step = run.train_step
        records = train_step.records()
        if run.mesh.rank != 0:
            return
        folder, plan = run.folder, run.layout.cost
        try:
            if train_step.streaming is None:
                measured = timeline(train_step.schedule, records)
                line = write_timeline(folder, number, measured, plan)
            elif window := train_step.streaming.recorded(number - 1, records):
                line = write_window(folder, number, window, plan)
            else:
                line = f"no timeline of step {number}: the pipeline was flushed after it"
        except OSError as error:
            line = f"no timeline of step {number}: {error}"
        run.note(line)
