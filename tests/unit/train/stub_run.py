"""A run that stands still, for callbacks to be called with: no process group, no model."""

from __future__ import annotations

import datetime
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megapipe.config.config import Config
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import Axis
from megapipe.layout.resolve import resolve
from megapipe.observe.record import StepRecord, ValidationRecord
from megapipe.train.callbacks import Callback, Run, Step
from megapipe.train.callbacks.callback_list import CallbackList
from megapipe.train.update import StepResult
from megapipe.util.skipped_samples import SkippedSamples
from megapipe.watch.journal import Journal

STEPS = 10


class Mesh:
    """Rank `rank` of two, whose peer is well."""

    def __init__(self, rank: int) -> None:
        self.rank, self.world = rank, 2
        self.device = torch.device("cpu")
        self.pp = self.dp = self.tp = self.cp = Axis.alone(rank)
        self.journal = Journal()
        self.barriers = 0

    def long_barrier(self, patience: datetime.timedelta) -> None:
        pass

    def barrier(self) -> None:
        self.barriers += 1

    def share(self, text: str) -> str:
        return text

    def agree(self, error: str | None) -> str | None:
        return error


class Reported:
    """Reports of a run: what the user is told."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.validations: list[ValidationRecord] = []
        self.notes: list[str] = []
        self.phases: list[str] = []
        self.closed = False

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def validation(self, record: ValidationRecord) -> None:
        self.validations.append(record)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.closed = True


def standing_run(
    folder: Path,
    *callbacks: Callback,
    rank: int = 0,
    world: int = 1,
    settings: dict[str, dict[str, Any]] | None = None,
    **of_step: Any,
) -> Run:
    """Make a run in `folder`, of batches of 8, whose train step has the given attributes."""
    given = settings or {}
    train = {"steps": STEPS, "global_batch": 8, "microbatch": 2, "sequence_length": 16}
    config = Config.model_validate({**given, "train": {**train, **given.get("train", {})}})
    config, layout = resolve(config, world, load_tokenizer("byte").vocab_size)
    usual: dict[str, Any] = {
        "settled": True,
        "streaming": None,
        "samples": lambda step: 8 * step,
        "scaler": SimpleNamespace(scales=False),
        "skipped_samples": SkippedSamples(),
    }
    run: Any = Run
    made: Run = run(
        config=config,
        layout=layout,
        mesh=Mesh(rank),
        train_step=SimpleNamespace(**{**usual, **of_step}),
        folder=folder,
        first_step=4,
        stop=False,
        observer=Reported() if rank == 0 else None,
        callbacks=CallbackList([], callbacks, []),
    )
    return made


def reported(run: Run) -> Reported:
    assert isinstance(run.observer, Reported)
    return run.observer


def result(number: int, **values: Any) -> StepResult:
    """Return the result of step `number`, counted from 1."""
    usual = {"loss": 2.0, "grad_norm": 1.0, "lr": 0.5, "tokens": 100, "seconds": 4.0}
    return StepResult(step=number - 1, **{**usual, **values})


def turn(number: int, **values: Any) -> Step:
    return Step(number, last=number == STEPS, **values)


def asked(callback: Callback, run: Run, wanted: str) -> list[int]:
    """Return the steps for which the callback makes this request; it makes no other one."""
    steps = [turn(number) for number in range(1, STEPS + 1)]
    for step in steps:
        callback.before_step(run, step)
        assert step in (turn(step.number), replace(turn(step.number), **{wanted: True}))
    return [step.number for step in steps if getattr(step, wanted)]


def keeps(callback: Callback, run: Run, request: str) -> bool:
    """Whether a request that another has made stays."""
    step = turn(1, **{request: True})
    callback.before_step(run, step)
    return bool(getattr(step, request))
