"""The hooks of a run, and what they are given.

On every rank the loop calls, in this order::

    begin                 once, before the first step
    for each step
        before_step       may ask for a recording, a profile, a validation, a checkpoint
        wishes            in the step, when its backward passes are done
        after_step        with the results that are known by now
        after_validation  where the step is validated
        before_save       where its checkpoint is written
        after_rewind      instead, where the run goes back to a checkpoint
    end                   after the last step; not where the run is stopped or fails
    close                 in any case

All ranks are at the same hook of the same step. A collective over ``run.mesh`` is therefore allowed
in each of them but ``wishes`` and ``close``, as long as every rank calls it.

A hook may raise on any rank, and that ends the job on all of them: a
:class:`~megapipe.errors.MegapipeError` with its line and its exit code, anything else as a
:class:`~megapipe.errors.CallbackError`, which names the callback, the hook, the rank and the place.
What ``close`` raises is a warning, since all is saved by then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.errors import CallbackError
from megapipe.launch.signals import StopRequest
from megapipe.layout.layout import Layout
from megapipe.observe.observer import Observer
from megapipe.observe.record import ValidationRecord
from megapipe.train.totals import Wishes
from megapipe.train.train_step import TrainStep
from megapipe.train.update import StepResult

A_SIGNAL = "a signal"
"""Stops a run that no callback stops."""


@dataclass(frozen=True)
class Run:
    """The run that hooks are called for, as this rank has it."""

    config: Config
    """With every default filled in."""
    layout: Layout
    mesh: ParallelMesh
    """Its ``rank`` is this process' number; ``barrier``, ``agree``, ... are collectives."""
    train_step: TrainStep
    """The stages that this process holds, and their optimizer."""
    folder: Path
    """The run folder, which exists."""
    first_step: int
    """Steps done before this start of the run."""
    stop: StopRequest
    """True once this process was sent a signal to stop."""
    observer: Observer | None
    """Takes records for the console and the logs; on rank 0 alone."""
    callbacks: Callback
    """All callbacks of the run, as one."""

    def note(self, text: str) -> None:
        """Tell the user a line, on the console and in the logs; on other ranks than 0 nothing."""
        if self.observer is not None:
            self.observer.note(text)

    def phase(self, text: str) -> None:
        """Show on a terminal what is done from now on, until the next step."""
        if self.observer is not None:
            self.observer.phase(text)

    def check_settled(self) -> None:
        """Raise :class:`CallbackError` where the last step may still be taken back."""
        if not self.train_step.settled:
            raise CallbackError(
                "a callback has set step.validate or step.save too late: expected in before_step"
            )


@dataclass
class Step:
    """A turn of the loop.

    ``record``, ``profile``, ``settle``, ``validate`` and ``save`` are requests: ``before_step`` may
    set them to True, alike on all ranks; later is too late.
    """

    number: int
    """Counted from 1, over all starts of the run."""
    last: bool
    """The run ends after it, validated and saved."""
    record: bool = False
    """``run.train_step.records()`` tells in ``after_step`` when each operation ran."""
    profile: bool = False
    """Operations have names for profilers, and nothing of the step runs on after it."""
    settle: bool = False
    """Its result is known and its weights are gathered when it ends, as for each that follows."""
    validate: bool = False
    save: bool = False
    """Also where a rank wished it."""
    stop: bool = False
    """The run is stopped after this step: it is saved and not validated."""
    unsaved: str = ""
    """Why the run that is stopped after this step is not saved, where there is no time for it."""
    results: list[StepResult] = field(default_factory=list)
    """For ``after_step``: those that have become known in this turn, oldest first, the same on all
    ranks. With ``optimizer.post_validation`` that of a step comes a turn later, unless the step is
    validated, saved or profiled; otherwise it is that of this step."""


class Callback:
    """Derive from it, and override what is needed: no hook does anything here. For example::

        class EarlyStop(Callback):
            best, worse = math.inf, False

            def after_validation(self, run, record):
                self.worse = record.loss > self.best
                self.best = min(self.best, record.loss)

            def wishes(self, run):
                return Wishes(stop=self.worse)

    See :mod:`megapipe.train.callbacks.callback` for when and where each hook is called, what may
    communicate, and what becomes of errors.
    """

    @property
    def who(self) -> str:
        """How it is named in the line of a run that it stops."""
        return f"callback {type(self).__name__}"

    def begin(self, run: Run) -> None:
        """All is set up or loaded; the first step comes next."""

    def before_step(self, run: Run, step: Step) -> None:
        """Make requests for a step that is about to begin, from what all ranks know alike."""

    def wishes(self, run: Run) -> Wishes:
        """Ask to stop the run, or for a checkpoint. If any rank asks, all of them do it.

        Called once a step; the run acts on it after that step, or after the next one with
        ``optimizer.post_validation``. A run that is stopped so ends as after a signal: it saves,
        says by which callback, and exits with 75.
        """
        return Wishes()

    def after_step(self, run: Run, step: Step) -> None:
        """The step is over; it is not yet validated and saved."""

    def after_validation(self, run: Run, record: ValidationRecord) -> None:
        """The run was validated, after ``record.step`` steps; the loss is the same on all ranks."""

    def before_save(self, run: Run, step: int) -> None:
        """A checkpoint of the state after `step` steps comes next."""

    def after_rewind(self, run: Run, step: int) -> None:
        """The run has gone back to its checkpoint of `step` steps: the one that comes next is the
        step after. The step that was under way, whose numbers were wrong, has had no after_step."""

    def end(self, run: Run) -> None:
        """The last step is done, validated and saved."""

    def close(self, run: Run) -> None:
        """Close files and connections, whatever has happened: perhaps nothing has begun.

        Called once, the last callback's first. Where another rank has failed and this one hangs, it
        comes from another thread.
        """
