"""``log.sample_ids``: a line per step with the samples that this process has read for the step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megapipe.data.batch import Batches
from megapipe.distributed.agreement import raise_on_all
from megapipe.errors import MegapipeError, not_written
from megapipe.observe.sample_log import LoggedSample, SampleWriter, new_start
from megapipe.train.callbacks.callback import Callback, Run, Step


class SampleLog(Callback):
    """Writes the origin (source, draw, number in the source) of each sample that local first stages
    received. The origins come from `batches`.

    Tensor- and context-parallel ranks receive equal samples; the first of these ranks writes.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._writer: SampleWriter | None = None

    def begin(self, run: Run) -> None:
        """Open the files; raises :class:`MegapipeError` on all ranks if any rank fails."""
        self._open(run, run.first_step)

    def after_rewind(self, run: Run, step: int) -> None:
        """Close the files and open new ones after `step`; raises as :meth:`begin` does."""
        self.close(run)
        self._open(run, step)

    def _open(self, run: Run, after: int) -> None:
        """Open files for the steps after `after`, and write the skipped samples."""
        start = ""
        error: MegapipeError | None = None
        try:
            if run.mesh.rank == 0:
                start = str(new_start(run.folder, after))
        except OSError as problem:
            error = _cannot_write(run, problem)
        raise_on_all(run.mesh, error)
        start = run.mesh.share(start)
        try:
            if run.mesh.tp.index == run.mesh.cp.index == 0:
                self._writer = SampleWriter(Path(start), run.mesh.rank)
            if run.mesh.rank == 0 and self._writer is not None:
                for first, stop in run.train_step.skipped_samples.ranges:
                    self._writer.skipped_samples(self._taken(range(first, stop)))
        except OSError as problem:
            error = _cannot_write(run, problem)
        raise_on_all(run.mesh, error)

    def after_step(self, run: Run, step: Step) -> None:
        """Write the step's samples; raises :class:`MegapipeError` if that fails."""
        if self._writer is None:
            return
        taken = self._taken(run.train_step.samples_read)
        try:
            if taken:
                self._writer.step(step.number, taken)
        except OSError as problem:
            raise _cannot_write(run, problem) from None

    def _taken(self, numbers: Iterable[int]) -> list[LoggedSample]:
        taken = []
        for number in numbers:
            origin = self._batches.origin(number)
            assert origin is not None, "training has no end"
            taken.append(LoggedSample(number, *origin))
        return taken

    def close(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()


def _cannot_write(run: Run, problem: OSError) -> MegapipeError:
    return not_written(f"log.sample_ids: cannot write to {run.folder}", problem)
