"""Exports of weights during a run in Hugging Face's format, every given number of steps."""

from __future__ import annotations

from megapipe.checkpoint.names import CheckpointName
from megapipe.checkpoint.reader import Checkpoint
from megapipe.convert import check_export, export
from megapipe.distributed.agreement import raise_on_all
from megapipe.errors import CheckpointError, ConfigError, MegapipeError
from megapipe.train.callbacks.callback import Callback, Run, Step
from megapipe.train.callbacks.checkpointing import Checkpointing
from megapipe.train.callbacks.validation import is_due
from megapipe.util.no_symlinks import make_folder

FOLDER = "exports"


class Exporting(Callback):
    """Exports what the callback `saving` has just saved (``checkpoint.export_every``)."""

    def __init__(self, saving: Checkpointing) -> None:
        self._saving = saving

    def begin(self, run: Run) -> None:
        """Check on rank 0, before any step, that the Hugging Face class computes the same model."""
        error: MegapipeError | None = None
        if run.mesh.rank == 0:
            try:
                check_export(run.config.model)
            except ConfigError as problem:
                every = run.config.checkpoint.export_every
                error = ConfigError(f"checkpoint.export_every={every}: {problem}")
        raise_on_all(run.mesh, error)

    def before_step(self, run: Run, step: Step) -> None:
        step.save |= is_due(run.config.checkpoint.export_every, step.number)

    def after_step(self, run: Run, step: Step) -> None:
        """Export on rank 0 if due, unless the export exists already from before a restart."""
        if step.unsaved or not is_due(run.config.checkpoint.export_every, step.number):
            return
        self._saving.finish(run)
        saved = self._saving.newest
        assert saved is not None, "saving is to come before exporting"
        key = CheckpointName.parsed(saved.name)
        output = run.folder / FOLDER / (key.plain if key else saved.name)
        error: MegapipeError | None = None
        if run.mesh.rank == 0 and not output.exists():
            try:
                make_folder(run.folder, FOLDER)
                export(Checkpoint.open(saved), output, dtype="bf16", is_checked=True, warn=run.note)
                run.note(f"exported {output}")
            except MegapipeError as problem:
                error = problem
            except OSError as problem:
                error = CheckpointError(f"cannot write {output}: {problem.strerror}")
        raise_on_all(run.mesh, error)
