"""Losses on held-out samples: validation at regular steps, validation and tests at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megapipe.data.build import HeldOutBatches
from megapipe.observe.record import ValidationRecord
from megapipe.train.callbacks.callback import Callback, Run, Step


class Validation(Callback):
    """Computes the loss on each set of `held_out`, and passes the loss to all callbacks."""

    def __init__(self, held_out: Sequence[HeldOutBatches]) -> None:
        self._held_out = held_out

    def before_step(self, run: Run, step: Step) -> None:
        step.validate |= step.last or is_due(run.config.train.validate_every, step.number)

    def after_step(self, run: Run, step: Step) -> None:
        """Validate the step; a signal during the validation ends the validation and the run."""
        if not step.validate or step.stop:
            return
        run.check_settled()
        for held_out in self._held_out:
            ends = step.number == run.config.train.steps
            if not step.stop and (held_out.split == "validation" or ends):
                self._score(run, step, held_out)

    def _score(self, run: Run, step: Step, held_out: HeldOutBatches) -> None:
        start = time.perf_counter()
        batches, train = held_out.batches, run.config.train
        samples, most = len(batches), train.validation_samples
        run.phase(f"{'testing' if held_out.split == 'test' else 'validating'} ...")
        if most is not None and held_out.split == "validation":
            samples = min(samples, most)
        found = run.train_step.evaluate(batches.rows, samples, stop=lambda: bool(run.stop))
        if found.stopped:
            step.stop = True
            return
        seconds = time.perf_counter() - start
        name, split = held_out.name, held_out.split
        record = ValidationRecord(step.number, train.steps, found.loss, seconds, name, split)
        run.callbacks.after_validation(run, record)


def is_due(every: int, step: int) -> bool:
    """Whether `step`, counted from 1, is a multiple of `every`; 0: never."""
    return every > 0 and step % every == 0
