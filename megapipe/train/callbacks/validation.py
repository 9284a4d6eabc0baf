"""Validation: the loss on held-out text, every so many steps and after the last."""

from __future__ import annotations

import time

from megapipe.data.batch import Batches
from megapipe.observe.record import ValidationRecord
from megapipe.train.callbacks.callback import Callback, Run, Step


class Validation(Callback):
    """Computes the loss on the held-out `batches`, and tells it to all callbacks."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def before_step(self, run: Run, step: Step) -> None:
        step.validate |= step.last or is_due(run.config.train.validate_every, step.number)

    def after_step(self, run: Run, step: Step) -> None:
        """A signal during the validation ends it, and the run."""
        if not step.validate or step.stop:
            return
        run.check_settled()
        start = time.perf_counter()
        samples, most = len(self._batches), run.config.train.validation_samples
        if most is not None:
            samples = min(samples, most)
        found = run.train_step.evaluate(self._batches.rows, samples, stop=lambda: bool(run.stop))
        if found.stopped:
            step.stop = True
            return
        seconds = time.perf_counter() - start
        record = ValidationRecord(step.number, run.config.train.steps, found.loss, seconds)
        run.callbacks.after_validation(run, record)


def is_due(every: int, step: int) -> bool:
    """Whether `step`, counted from 1, is one of every so many; 0: none is."""
    return every > 0 and step % every == 0
