"""Settings that a run obeys beside its numbers: when garbage is collected, which clock saves."""

from __future__ import annotations

import gc
from pathlib import Path
from unittest import mock

import pytest

import megapipe
from megapipe.train.callbacks import Callback, Run, Step
from megapipe.train.callbacks.checkpointing import Clock
from tests.unit.train.objects import Counting, layers, settings

pytestmark = pytest.mark.usefixtures("without_git")


class Collections(Callback):
    """Steps after which garbage is collected by hand."""

    def __init__(self) -> None:
        self.step = 0
        self.after: list[int] = []

    def after_step(self, run: Run, step: Step) -> None:
        self.step = step.number

    def note(self, phase: str, info: dict[str, int]) -> None:
        """Note a step of Python's collector, which calls this."""
        if phase == "start" and info["generation"] == 2 and not gc.isenabled():
            self.after.append(self.step)


def test_garbage_is_collected_every_so_many_steps_and_the_clock_counts_minutes(
    tmp_path: Path,
) -> None:
    seen = Collections()
    given = settings(tmp_path) | {
        "run.gc_interval": 3,
        "train.steps": 7,
        "checkpoint.every_minutes": 1.5,
    }
    gc.callbacks.append(seen.note)
    try:
        with mock.patch("megapipe.train.trainer.Clock", wraps=Clock) as clock:
            megapipe.train(given, model=layers, data=Counting, callbacks=[seen])
    finally:
        gc.callbacks.remove(seen.note)
    assert seen.after == [3, 6]
    assert [call.args for call in clock.call_args_list] == [(90.0,)]
