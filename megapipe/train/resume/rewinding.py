"""Rewinding: going back to a checkpoint within a run, and skipping samples after it.

A batch that causes an anomaly is skipped (Chowdhery et al., 2204.02311, section 5.1). Weights and
states are reloaded from a checkpoint, and the steps since then are repeated, with later samples
instead of the skipped ones. So a new run of the same configuration that skips the same samples from
its start makes the same steps.

A checkpoint is given up if no finite step follows it, whatever the samples: its weights are ruined.
The run then goes back to an older checkpoint. If the run saves that step again, and again no finite
step follows, the older checkpoint is given up too, with everything saved since, and so on.
"""

from __future__ import annotations

import json

from megapipe.checkpoint.failed import FailedCheckpoints
from megapipe.checkpoint.folders import committed
from megapipe.checkpoint.names import CheckpointName
from megapipe.checkpoint.reader import Checkpoint
from megapipe.distributed.agreement import raise_on_all
from megapipe.errors import CheckpointError
from megapipe.text import count_noun
from megapipe.train.anomaly_detection import ADVICE, BadStep
from megapipe.train.callbacks.callback import Run
from megapipe.train.callbacks.checkpointing import Checkpointing
from megapipe.train.resume.find import newest_intact
from megapipe.train.resume.load import load
from megapipe.util.skipped_samples import SkippedSamples


class Rewinding:
    """Rewinds a run to checkpoints that `saving` has saved, but never to those in `failed`.

    `begun` is the checkpoint of this run from which this start resumed; None if there is none, or
    if settings of model or optimizer have changed.
    """

    def __init__(
        self, saving: Checkpointing, failed: FailedCheckpoints, begun: Checkpoint | None
    ) -> None:
        self._saving = saving
        self._failed = failed
        self._begun = begun
        self._last = begun
        """Checkpoint of the newest rewind; before the first rewind, `begun`."""
        self._times = 0
        """Number of consecutive rewinds to the checkpoint `_last`."""

    def go_back(self, run: Run, problem: BadStep) -> int:
        """Rewind the run, on all ranks; return the number of steps of the checkpoint.

        Raises `problem`, possibly with more text, if it does not call for a rewind, if there is no
        checkpoint, or after too many rewinds to the checkpoint.
        """
        if not problem.rewinds:
            if self._begun is None or not self._is_to_blame(self._begun, problem):
                raise problem
            self._give_up([self._begun.path.name], self._begun.path.name)
            raise _ended(
                problem,
                f"it is the first one after {self._begun.path}, which the next start skips if "
                "there is another checkpoint",
            )
        self._saving.finish(run)
        checkpoint, skipped = self._chosen(run, problem)
        step = run.train_step
        first = max(checkpoint.step, problem.step + 1 - run.config.health.rewind_skip_batches)
        start = step.skipped_samples.number_after(step.samples(first))
        stop = step.skipped_samples.number_after(step.samples(problem.step + 1) - 1) + 1
        step.skipped_samples = step.skipped_samples.union(SkippedSamples(((start, stop),)))
        load(checkpoint, step.state, run.mesh)
        for reason in skipped:
            run.note(f"skipped a damaged checkpoint: {reason}")
        run.note(
            f"{problem}: rewound from step {problem.step + 1} to step {checkpoint.step} "
            f"({checkpoint.path}), rewind {self._times} of {run.config.health.max_rewinds}; "
            f"samples {start} to {stop - 1} are skipped. To repeat these steps in a new run: "
            f"health.skip_samples={step.skipped_samples}"
        )
        run.callbacks.after_rewind(run, checkpoint.step)
        return checkpoint.step

    def _chosen(self, run: Run, problem: BadStep) -> tuple[Checkpoint, list[str]]:
        """Choose the checkpoint to rewind to; return it, and why newer checkpoints were skipped."""
        most, skipped = run.config.health.max_rewinds, list[str]()
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
                repeats = self._last is not None and self._last.path == checkpoint.path
                self._times = self._times + 1 if repeats else 1
                self._last = checkpoint
                if self._times <= most:
                    return checkpoint, skipped
                if not to_blame:
                    raise _ended(
                        problem,
                        f"the run was rewound to {checkpoint.path} "
                        f"{count_noun(most, 'time')}, and health.max_rewinds={most}; {ADVICE}",
                    )
            names = self._saved_since(run, checkpoint)
            before = {*self._failed.names}
            self._give_up(names, checkpoint.path.name)
            others = sorted({*names} - {*before, checkpoint.path.name})
            more = f"; so {'are' if others[1:] else 'is'} {', '.join(others)}, which led to it"
            run.note(
                f"{checkpoint.path} is skipped from now on: no step after it is finite"
                + (more if others else "")
            )

    @staticmethod
    def _is_to_blame(checkpoint: Checkpoint, problem: BadStep) -> bool:
        """Whether the problem is that the first step after the checkpoint is not finite."""
        return problem.step == checkpoint.step and not problem.finite

    def _saved_since(self, run: Run, newest: Checkpoint) -> list[str]:
        """Return the names of all checkpoints from the step of the newest rewind on, or from
        `newest` on if that is earlier. Collective."""
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
        """Mark checkpoints as failed, in this start and later ones; `not_finite` is the checkpoint
        that no finite step follows. Not collective: if stages are updated one by one, not all ranks
        learn of the problem."""
        for name in names:
            self._failed.add(name, not_finite=name == not_finite)
        for path in self._failed.paths:
            self._saving.distrust(path)


def _no_more(given_up: list[str], most: int) -> str:
    """Return the reason why no checkpoint is left to rewind to after those in `given_up`."""
    none = "there is no checkpoint to rewind to"
    if not given_up:
        return none
    reason = f"no finite step follows {', '.join(given_up)}"
    return (
        f"{reason}, and health.max_rewinds={most}"
        if len(given_up) > most
        else f"{reason}, and {none}"
    )


def _ended(problem: BadStep, why: str) -> BadStep:
    """Return the problem that ends the run, with the reason appended."""
    text = f"{problem}; {why}"
    return BadStep(text, problem.step, rewinds=False, finite=problem.finite)
