"""Going back to a checkpoint within a run, whose next steps leave samples out.

A batch that a run does not take well is passed over (Chowdhery et al., 2204.02311, section 5.1):
weights and states are those of a checkpoint again, and the steps since then are made anew, with
later samples in the place of those that are left out. So a new run of the same configuration that
leaves out the same samples from its start on makes the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.checkpoint.storage import Place
from megapipe.left_out import LeftOut
from megapipe.train.callbacks.callback import Run
from megapipe.train.callbacks.saving import Saving
from megapipe.train.judge import ADVICE, Unsound
from megapipe.train.resume import load, newest_intact
from megapipe.words import counted


class Rewinding:
    """Takes a run back to what `saving` has saved, but to no checkpoint that has `failed`."""

    def __init__(self, saving: Saving, failed: Sequence[Place]) -> None:
        self._saving = saving
        self._failed = failed
        self._last: Place | None = None
        """The checkpoint that the run went back to last, ..."""
        self._times = 0
        """... and how often in a row."""

    def go_back(self, run: Run, problem: Unsound) -> int:
        """Take the run back, on all ranks; returns the steps that its checkpoint has.

        Raises `problem`, or one that says more, where there is no checkpoint, or the run went back
        to it too often.
        """
        self._saving.finish(run)
        found = newest_intact(self._saving.checkpoints, run.mesh, self._failed)
        checkpoint, most = found.checkpoint, run.config.numbers.rewinds
        if checkpoint is None:
            raise Unsound(
                f"{problem}; there is no checkpoint to go back to; {ADVICE}",
                problem.step,
                rewinds=False,
            )
        self._times = self._times + 1 if checkpoint.path == self._last else 1
        self._last = checkpoint.path
        if self._times > most:
            raise Unsound(
                f"{problem}; the run went back to {checkpoint.path} {counted(most, 'time')}, and "
                f"numbers.rewinds={most}; {ADVICE}",
                problem.step,
                rewinds=False,
            )
        step = run.train_step
        first = max(checkpoint.step, problem.step + 1 - run.config.numbers.leave_out)
        start = step.left_out.number(step.samples(first))
        stop = step.left_out.number(step.samples(problem.step + 1) - 1) + 1
        step.left_out = step.left_out.with_(LeftOut(((start, stop),)))
        load(checkpoint, run.config, step, run.mesh)
        for reason in found.skipped:
            run.note(f"passed over a damaged checkpoint: {reason}")
        run.note(
            f"{problem}: gone back from step {problem.step + 1} to step {checkpoint.step}, "
            f"{checkpoint.path}, time {self._times} of {most}; samples {start} to {stop - 1} are "
            f"left out; a new run takes the same steps with numbers.skip_samples={step.left_out}"
        )
        run.callbacks.after_rewind(run, checkpoint.step)
        return checkpoint.step
