"""``log.samples``: a line of each step for the samples that this process has read for it."""

from __future__ import annotations

from pathlib import Path

from megapipe.data.batch import Batches
from megapipe.distributed.agreement import all_or_none
from megapipe.errors import ConfigError
from megapipe.observe.samples import SampleWriter, Taken, new_start
from megapipe.train.callbacks.callback import Callback, Run, Step


class SampleLog(Callback):
    """Writes where the samples of `batches` come from that first stages here were given.

    Tensor-parallel ranks are given the same ones: the first of them writes.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._writer: SampleWriter | None = None

    def begin(self, run: Run) -> None:
        """Raises :class:`ConfigError` on all ranks if a file cannot be made on one."""
        start, error = "", None
        try:
            if run.mesh.rank == 0:
                start = str(new_start(run.folder, run.first_step))
        except OSError as problem:
            error = _cannot_write(run, problem)
        all_or_none(run.mesh, error)
        start = run.mesh.share(start)
        try:
            if run.mesh.tp.index == 0:
                self._writer = SampleWriter(Path(start), run.mesh.rank)
        except OSError as problem:
            error = _cannot_write(run, problem)
        all_or_none(run.mesh, error)

    def after_step(self, run: Run, step: Step) -> None:
        """Raises :class:`ConfigError` if the file takes no line."""
        if self._writer is None:
            return
        taken = []
        for number in run.train_step.samples_read:
            origin = self._batches.origin(number)
            assert origin is not None, "training has no end"
            taken.append(Taken(number, *origin))
        try:
            if taken:
                self._writer.step(step.number, taken)
        except OSError as problem:
            raise _cannot_write(run, problem) from None

    def close(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()


def _cannot_write(run: Run, problem: OSError) -> ConfigError:
    return ConfigError(f"log.samples: cannot write to {run.folder}: {problem.strerror}")
