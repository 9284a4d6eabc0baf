"""Going back to a checkpoint within a run, whose next steps leave samples out.

A batch that a run does not take well is passed over (Chowdhery et al., 2204.02311, section 5.1):
weights and states are those of a checkpoint again, and the steps since then are made anew, with
later samples in the place of those that are left out. So a new run of the same configuration that
leaves out the same samples from its start on makes the same steps.
"""

from __future__ import annotations

from megapipe.checkpoint.reader import Checkpoint
from megapipe.checkpoint.storage import Place
from megapipe.left_out import LeftOut
from megapipe.train.callbacks.callback import Run
from megapipe.train.callbacks.saving import Saving
from megapipe.train.judge import ADVICE, Unsound
from megapipe.train.resume import load, mark_failed, newest_intact
from megapipe.words import counted


class Rewinding:
    """Takes a run back to what `saving` has saved, but to no checkpoint that has `failed`.

    One has also failed where numbers are not finite in the step that follows it, whatever its
    samples: starts pass over it from then on. `begun` is the run's own checkpoint that this start
    goes on from, if any, with the model and the optimizer as they were.
    """

    def __init__(self, saving: Saving, failed: list[Place], begun: Checkpoint | None) -> None:
        self._saving = saving
        self._failed = failed
        self._begun = begun
        self._last: Place | None = None
        """The checkpoint that the run went back to last, ..."""
        self._times = 0
        """... and how often in a row."""

    def go_back(self, run: Run, problem: Unsound) -> int:
        """Take the run back, on all ranks; returns the steps that its checkpoint has.

        Raises `problem`, or one that says more, where the run is not to go back, there is no
        checkpoint, or it went back to it too often.
        """
        if not problem.rewinds:
            if self._begun is None or not self._is_to_blame(self._begun, problem):
                raise problem
            self._give_up(run, self._begun)
            raise _ended(
                problem,
                f"it is the first one after {self._begun.path}, which the next start passes over "
                "if there is another",
            )
        self._saving.finish(run)
        checkpoint, skipped = self._chosen(run, problem)
        step = run.train_step
        first = max(checkpoint.step, problem.step + 1 - run.config.numbers.leave_out)
        start = step.left_out.number(step.samples(first))
        stop = step.left_out.number(step.samples(problem.step + 1) - 1) + 1
        step.left_out = step.left_out.with_(LeftOut(((start, stop),)))
        load(checkpoint, run.config, step, run.mesh)
        for reason in skipped:
            run.note(f"passed over a damaged checkpoint: {reason}")
        run.note(
            f"{problem}: gone back from step {problem.step + 1} to step {checkpoint.step}, "
            f"{checkpoint.path}, time {self._times} of {run.config.numbers.rewinds}; samples "
            f"{start} to {stop - 1} are left out; a new run takes the same steps with "
            f"numbers.skip_samples={step.left_out}"
        )
        run.callbacks.after_rewind(run, checkpoint.step)
        return checkpoint.step

    def _chosen(self, run: Run, problem: Unsound) -> tuple[Checkpoint, list[str]]:
        """The checkpoint to go back to, and why newer ones were passed over."""
        most, skipped = run.config.numbers.rewinds, list[str]()
        while True:
            found = newest_intact(self._saving.checkpoints, run.mesh, self._failed)
            skipped += [reason for reason in found.skipped if reason not in skipped]
            if (checkpoint := found.checkpoint) is None:
                raise _ended(problem, f"there is no checkpoint to go back to; {ADVICE}")
            self._times = self._times + 1 if checkpoint.path == self._last else 1
            self._last = checkpoint.path
            if self._times <= most:
                return checkpoint, skipped
            if not self._is_to_blame(checkpoint, problem):
                raise _ended(
                    problem,
                    f"the run went back to {checkpoint.path} {counted(most, 'time')}, and "
                    f"numbers.rewinds={most}; {ADVICE}",
                )
            self._give_up(run, checkpoint)
            run.note(
                f"{checkpoint.path} is passed over from now on: no step that follows it is finite"
            )

    @staticmethod
    def _is_to_blame(checkpoint: Checkpoint, problem: Unsound) -> bool:
        """Whether numbers are not finite in the first step after the checkpoint."""
        return problem.step == checkpoint.step and not problem.finite

    def _give_up(self, run: Run, checkpoint: Checkpoint) -> None:
        """Count on a checkpoint no more, in this start and in later ones. No collective: where
        stages are updated one by one, not all ranks learn of the problem."""
        mark_failed(checkpoint.path)
        self._failed.append(checkpoint.path)
        self._saving.distrust(checkpoint.path)


def _ended(problem: Unsound, why: str) -> Unsound:
    """The problem that ends the run, with a second half of its line."""
    text = f"{problem}; {why}"
    return Unsound(text, problem.step, rewinds=False, finite=problem.finite)
