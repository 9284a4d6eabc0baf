"""Going back to a checkpoint within a run, whose next steps leave samples out.

A batch that a run does not take well is passed over (Chowdhery et al., 2204.02311, section 5.1):
weights and states are those of a checkpoint again, and the steps since then are made anew, with
later samples in the place of those that are left out. So a new run of the same configuration that
leaves out the same samples from its start on makes the same steps.

A checkpoint is given up if no finite step follows it, whatever the samples: its weights are ruined.
The run then goes back to an older one. If it comes from there to another checkpoint of the same
step that no finite step follows, it gives up the older one as well, with all that it has saved
since, and so on.
"""

from __future__ import annotations

import json

from megapipe.checkpoint.failed import FailedCheckpoints
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import CheckpointName
from megapipe.checkpoint.reader import Checkpoint
from megapipe.distributed.agreement import raise_on_all
from megapipe.errors import CheckpointError
from megapipe.train.callbacks.callback import Run
from megapipe.train.callbacks.saving import Checkpointing
from megapipe.train.judge import ADVICE, BadStep
from megapipe.train.resume.find import newest_intact
from megapipe.train.resume.load import load
from megapipe.util.left_out import SkippedSamples
from megapipe.words import count_noun


class Rewinding:
    """Takes a run back to what `saving` has saved, but to no checkpoint that has `failed`.

    `begun` is the run's own checkpoint that this start goes on from, if any, with the model and the
    optimizer as they were.
    """

    def __init__(
        self, saving: Checkpointing, failed: FailedCheckpoints, begun: Checkpoint | None
    ) -> None:
        self._saving = saving
        self._failed = failed
        self._begun = begun
        self._last = begun
        """The checkpoint that the run went back to last, or began from, ..."""
        self._times = 0
        """... and how often in a row it went back."""

    def go_back(self, run: Run, problem: BadStep) -> int:
        """Take the run back, on all ranks; returns the steps that its checkpoint has.

        Raises `problem`, or one that says more, where the run is not to go back, there is no
        checkpoint, or it went back to it too often.
        """
        if not problem.rewinds:
            if self._begun is None or not self._is_to_blame(self._begun, problem):
                raise problem
            self._give_up([self._begun.path.name], self._begun.path.name)
            raise _ended(
                problem,
                f"it is the first one after {self._begun.path}, which the next start passes over "
                "if there is another",
            )
        self._saving.finish(run)
        checkpoint, skipped = self._chosen(run, problem)
        step = run.train_step
        first = max(checkpoint.step, problem.step + 1 - run.config.numbers.leave_out)
        start = step.left_out.number_after(step.samples(first))
        stop = step.left_out.number_after(step.samples(problem.step + 1) - 1) + 1
        step.left_out = step.left_out.union(SkippedSamples(((start, stop),)))
        load(checkpoint, step.state, run.mesh)
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

    def _chosen(self, run: Run, problem: BadStep) -> tuple[Checkpoint, list[str]]:
        """Choose the checkpoint to go back to; returns also why newer ones were passed over."""
        most, skipped = run.config.numbers.rewinds, list[str]()
        while True:
            found = newest_intact(self._saving.checkpoints, run.mesh, self._failed.paths)
            skipped += [reason for reason in found.skipped if reason not in skipped]
            if (checkpoint := found.checkpoint) is None:
                raise _ended(problem, f"{_no_more(self._failed.not_finite(), most)}; {ADVICE}")
            step = checkpoint.step
            to_blame = self._is_to_blame(checkpoint, problem)
            if not (to_blame and self._failed.not_finite(at_least=step, at_most=step)):
                given_up = self._failed.not_finite(at_least=step)
                if len(given_up) > most:
                    raise _ended(problem, f"{_no_more(given_up, most)}; {ADVICE}")
                again = self._last is not None and self._last.path == checkpoint.path
                self._times = self._times + 1 if again else 1
                self._last = checkpoint
                if self._times <= most:
                    return checkpoint, skipped
                if not to_blame:
                    raise _ended(
                        problem,
                        f"the run went back to {checkpoint.path} {count_noun(most, 'time')}, and "
                        f"numbers.rewinds={most}; {ADVICE}",
                    )
            names = self._saved_since(run, checkpoint)
            before = {*self._failed.names}
            self._give_up(names, checkpoint.path.name)
            others = sorted({*names} - {*before, checkpoint.path.name})
            more = f"; so {'are' if others[1:] else 'is'} {', '.join(others)}, which led there"
            run.note(
                f"{checkpoint.path} is passed over from now on: no step that follows it is finite"
                + (more if others else "")
            )

    @staticmethod
    def _is_to_blame(checkpoint: Checkpoint, problem: BadStep) -> bool:
        """Whether numbers are not finite in the first step after the checkpoint."""
        return problem.step == checkpoint.step and not problem.finite

    def _saved_since(self, run: Run, newest: Checkpoint) -> list[str]:
        """Return the names of all checkpoints from the step on to which the run went back last, or
        that of `newest` if it is earlier. Collective: every rank calls it."""
        first = newest.step if self._last is None else min(self._last.step, newest.step)
        found, error = list[CheckpointName](), None
        if run.mesh.rank == 0:
            try:
                found = committed(self._saving.checkpoints)
            except CheckpointError as problem:
                error = problem
        raise_on_all(run.mesh, error)
        names = [key.name for key in found if key.step >= first]
        return list(json.loads(run.mesh.share(json.dumps(names))))

    def _give_up(self, names: list[str], not_finite: str) -> None:
        """Count on checkpoints no more, in this start and in later ones: no finite step follows the
        one named last. No collective: where stages are updated one by one, not all ranks learn of
        the problem."""
        for name in names:
            self._failed.add(name, not_finite=name == not_finite)
        for path in self._failed.paths:
            self._saving.distrust(path)


def _no_more(given_up: list[str], most: int) -> str:
    """Say why the run is not to go back to an older checkpoint than those `given_up`."""
    none = "there is no checkpoint to go back to"
    if not given_up:
        return none
    told = f"no finite step follows {', '.join(given_up)}"
    return f"{told}, and numbers.rewinds={most}" if len(given_up) > most else f"{told}, and {none}"


def _ended(problem: BadStep, why: str) -> BadStep:
    """The problem that ends the run, with a second half of its line."""
    text = f"{problem}; {why}"
    return BadStep(text, problem.step, rewinds=False, finite=problem.finite)
