"""Tensorboard event files in the run folder; imported only when switched on."""

from pathlib import Path

from megapipe.observe.record import StepRecord, ValidationRecord
from megapipe.util.no_symlinks import make_folder


class TensorboardSink:
    """Writes scalars and notes into a subfolder of the run folder."""

    name = "tensorboard"

    def __init__(self, run_folder: Path) -> None:
        self._folder = str(make_folder(run_folder, self.name))
        self._step = 0
        self._open()

    def _open(self, purge_step: int | None = None) -> None:
        """Open a new event file; hide the values of earlier files from `purge_step` on."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=purge_step)

    def step(self, record: StepRecord) -> None:
        """Write a step's scalars. If the run has gone back, hide repeated steps' old values."""
        if record.step <= self._step or (self._step == 0 and record.step > 1):
            self._writer.close()
            self._open(record.step)
        self._step = record.step
        for name, value in record.metrics().items():
            self._writer.add_scalar(name, value, record.step)

    def validation(self, record: ValidationRecord) -> None:
        """Write the validation loss and flush the file, as validations are rare."""
        self._writer.add_scalar(record.metric, record.loss, record.step)
        self._writer.flush()

    def note(self, text: str) -> None:
        """Write a line of text as an entry at the newest step."""
        self._writer.add_text("notes", text, self._step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
