"""The hooks that callbacks implement, and the arguments of hooks.

On every rank the loop calls, in this order::

    begin                 once, before the first step
    for each step
        before_step       may request a recording, a profile, a validation, a checkpoint
        requests          in the step, when its backward passes are done
        after_step        with the results that are known by now
        after_validation  if the step is validated
        before_save       if its checkpoint is written
        after_rewind      instead of after_step, if the run goes back to a checkpoint
    end                   after the last step; not if the run is stopped or fails
    close                 in any case

All ranks call the same hook of the same step. So each hook except ``requests`` and ``close`` may
call a collective over ``run.mesh``, as long as every rank calls it.

An error that a hook raises on any rank ends the job on all ranks. A
:class:`~megapipe.errors.MegapipeError` has its own line and exit code. Other exceptions become a
:class:`~megapipe.errors.CallbackError`, which names the callback, the hook, the rank and the place.
An exception in ``close`` is only a warning, since everything is saved by then.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path

from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import CallbackError
from megapipe.launch.signals import StopRequest
from megapipe.layout.layout import Layout
from megapipe.observe.observer import Observer
from megapipe.observe.record import ValidationRecord
from megapipe.train.step_stats import RankRequests
from megapipe.train.train_step import TrainStep
from megapipe.train.update import StepResult

A_SIGNAL = "a signal"
"""Text in place of a callback's name if a signal, not a callback, has stopped the run."""


@dataclass(frozen=True)
class Run:
    """The run to which a callback belongs, as seen by this rank."""

    config: Config
    """Configuration with every default filled in."""
    layout: Layout
    mesh: ParallelMesh
    """Mesh of the job: ``rank`` is this process; ``barrier``, ``agree``, ... are collectives."""
    train_step: TrainStep
    """Training step of this process: its stages and their optimizer."""
    folder: Path
    """Run folder, which exists."""
    first_step: int
    """Number of steps done before this start of the run."""
    stop: StopRequest
    """Stop request; true once this process has received a signal to stop."""
    observer: Observer | None
    """Receiver of records for the console and the logs; only on rank 0."""
    callbacks: Callback
    """All callbacks of the run, as one callback."""

    def note(self, text: str) -> None:
        """Print a line on the console and into the logs; does nothing on ranks other than 0."""
        if self.observer is not None:
            self.observer.note(text)

    def phase(self, text: str) -> None:
        """Show a phase, such as "saving ...", on a terminal until the next step."""
        if self.observer is not None:
            self.observer.phase(text)

    def check_settled(self) -> None:
        """Raise :class:`CallbackError` if the last step's update may still be undone."""
        if not self.train_step.settled:
            raise CallbackError(
                "a callback set step.validate or step.save too late: set it in before_step"
            )


@dataclass
class Step:
    """One iteration of the loop.

    ``record``, ``profile``, ``settle``, ``validate`` and ``save`` are requests: ``before_step`` may
    set them to True, equally on all ranks; later hooks must not.
    """

    number: int
    """Number of the step, counted from 1, over all starts of the run."""
    last: bool
    """Whether this step is the last of the run. The run validates and saves after it."""
    record: bool = False
    """Whether to record when each operation runs, for ``run.train_step.records()``."""
    profile: bool = False
    """Whether to name operations for profilers, and to end the step with an idle device."""
    settle: bool = False
    """Whether to end the step with its result known and with all-gathered weights."""
    validate: bool = False
    save: bool = False
    """Whether to save a checkpoint; also set if a rank requests one."""
    stop: bool = False
    """Whether the run stops after this step. The step is then saved but not validated."""
    unsaved: str = ""
    """Reason why a run that stops does not save this step; "" if it has time to."""
    results: list[StepResult] = field(default_factory=list)
    """Newly known results for ``after_step``, oldest first, equal on all ranks. Usually it is only
    the result of this step. With ``optimizer.post_validation`` a step's result comes one iteration
    later, unless the step is validated, saved or profiled."""


class Callback:
    """Base of callbacks: derive from it and override hooks, which do nothing here. For example::

        class EarlyStop(Callback):
            best, worse = math.inf, False

            def after_validation(self, run, record):
                self.worse = record.loss > self.best
                self.best = min(self.best, record.loss)

            def requests(self, run):
                return RankRequests(stop=self.worse)

    :mod:`megapipe.train.callbacks.callback` says when and where each hook is called, which hooks
    may communicate, and what happens with errors.
    """

    @property
    def who(self) -> str:
        """Name of this callback in the line that a run prints when the callback stops the run."""
        return f"callback {type(self).__name__}"

    def begin(self, run: Run) -> None:
        """Prepare for the first step, once everything is set up and loaded."""

    def before_step(self, run: Run, step: Step) -> None:
        """Make requests for a step that is about to begin, equally on all ranks."""

    def requests(self, run: Run) -> RankRequests:
        """Return what this rank requests: to stop the run, or to save. A request of any rank
        applies to all ranks.

        Called once a step; the run acts on requests after that step, or, with
        ``optimizer.post_validation``, after the next one. A run that is stopped this way ends as
        after a signal: it saves, prints the callback's name, and exits with 75.
        """
        old = getattr(self, "wishes", None)  # the hook's name in version 0.1
        if old is None:
            return RankRequests()
        warnings.warn(
            f"{type(self).__name__}.wishes: the hook is called requests; its old name is called "
            "for one release more",
            FutureWarning,
            stacklevel=2,
        )
        found: RankRequests = old(run)
        return found

    def after_step(self, run: Run, step: Step) -> None:
        """React to the end of a step, before it is validated or saved."""

    def after_validation(self, run: Run, record: ValidationRecord) -> None:
        """React to a validation after ``record.step`` steps; the loss is equal on all ranks."""

    def before_save(self, run: Run, step: int) -> None:
        """Prepare for the checkpoint after `step` steps, just before it is saved."""

    def after_rewind(self, run: Run, step: int) -> None:
        """React to a rewind to the checkpoint of `step` steps; step `step` + 1 comes next. For the
        step with the anomaly, ``after_step`` was not called."""

    def end(self, run: Run) -> None:
        """React to the end of the run: the last step is done, validated and saved."""

    def close(self, run: Run) -> None:
        """Close files and connections; called in any case, even if the run has not begun.

        Callbacks are closed once, in reverse order. If another rank has failed and this rank hangs,
        another thread calls this method.
        """
