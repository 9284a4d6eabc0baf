"""Runs with the real trainer, on the ranks of a test world, that are stopped and resumed."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megapipe.checkpoint import Checkpoint
from megapipe.checkpoint.storage import StorageLocation
from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.data.tokenizer import load_tokenizer
from megapipe.distributed.mesh import Grid
from megapipe.errors import MegapipeError
from megapipe.launch.signals import StopRequest
from megapipe.layout.resolve import resolve
from megapipe.observe.record import ValidationRecord
from megapipe.testing import World, run_world
from megapipe.train.callbacks import Callback, Run, Step
from megapipe.train.callbacks.checkpointing import Clock
from megapipe.train.start_point import Finished
from megapipe.train.trainer import Trainer
from tests.parity.jobs import arguments, tiny
from tests.parity.ranks import local_copies

VOCABULARY = 257
STEPS, HALF = 8, 4
BASE = {
    "model.layers": "4",
    "train.steps": str(STEPS),
    "train.global_batch": "8",
    "train.validate_every": str(HALF),
    "checkpoint.every": str(HALF),
    "checkpoint.keep": "9",
    "optimizer.lr": "1e-2",
    "optimizer.max_grad_norm": "0.5",
}
DP = {"parallel.dp": "2", "parallel.pp": "2", "model.dropout": "0.1"}
TP = {"parallel.tp": "2", "parallel.pp": "2", "parallel.sequence_parallel": "true"}


class Interrupted(BaseException):
    """Ends a test run where a killed one would."""


@dataclass(frozen=True)
class Play:
    """A run with the real trainer.

    `stop_after` ends it after the checkpoint of that step as if it were killed. `preempt` sends
    rank 1 a signal during that step, by default a scheduler's. `clocks` are the ranks' own clocks,
    by which they save.
    """

    name: str
    settings: Mapping[str, str]
    stop_after: int | None = None
    preempt: int | None = None
    sign: signal.Signals = signal.SIGUSR1
    clocks: tuple[Callable[[], Clock], ...] = ()
    callbacks: tuple[Callback, ...] = ()
    """Called before the witness."""


@dataclass
class Witness(Callback):
    """Notes what a rank sees of a run, and interferes with it as `play` says."""

    play: Play
    outcome: dict[str, Any]

    def before_step(self, run: Run, step: Step) -> None:
        if self.play.stop_after == step.number - 1:
            raise Interrupted
        if self.play.preempt == step.number and run.mesh.rank == 1:
            os.kill(os.getpid(), self.play.sign)

    def after_step(self, run: Run, step: Step) -> None:
        for result in step.results:
            self.outcome.setdefault("steps", {})[result.step + 1] = result

    def after_validation(self, run: Run, record: ValidationRecord) -> None:
        self.outcome["validation"] = record.loss


def play_all(world: World, base: Mapping[str, str], plays: list[Play]) -> list[dict[str, Any]]:
    """Run all plays, one after another; return this rank's results."""
    return [play(world, base, each) for each in plays]


def play(world: World, base: Mapping[str, str], this: Play) -> dict[str, Any]:
    """Run one play; return what this rank reported, its weights, its optimizer."""
    config: Config = parse(arguments({**base, **this.settings, "run.name": this.name})).config
    tokenizer = load_tokenizer("byte")
    config, layout = resolve(config, world.size, tokenizer.vocab_size)
    mesh = world.mesh(
        Grid(layout.pp, layout.dp, layout.cp, layout.tp, *layout.ep_sizes, layout.ranks_per_node)
    )
    outcome: dict[str, Any] = {"error": None, "validation": math.nan}
    witness = Witness(this, outcome)
    trainer = None
    stop = StopRequest()
    try:
        trainer = Trainer(
            config,
            layout,
            mesh,
            tokenizer,
            local_rank=world.rank,
            stop=stop,
            callbacks=[*this.callbacks, witness],
        )
        if this.clocks:
            trainer.saving.clock = this.clocks[world.rank]()
        loaded = trainer.first_step or trainer.source.weights is not None
        outcome["loaded"] = list(local_copies(trainer.train_step)) if loaded else None
        rows = trainer.training.rows

        def rows_and_note(samples: Sequence[int]) -> Any:
            outcome.setdefault("samples", set()).update(samples)
            return rows(samples)

        trainer.training.rows = rows_and_note  # type: ignore[method-assign]

        trainer.run()
    except Interrupted:
        pass
    except Finished as finished:
        outcome["finished"] = str(finished)
        return outcome
    except MegapipeError as error:
        outcome["error"] = (type(error), str(error))
        if trainer is None:
            return outcome
    finally:
        stop.__exit__()
        if trainer is not None:
            trainer.close()
    assert trainer is not None
    outcome["first_step"] = trainer.first_step
    outcome["run_id"] = trainer.run_id
    outcome["copies"] = list(local_copies(trainer.train_step))
    outcome["state"] = [
        (owned.spec.name, owned.start, kind, values.double().clone().numpy())
        for owned in trainer.train_step.optimizer.own_slices()
        for kind, values in owned.values.items()
    ]
    return outcome


def run(folder: Path, *plays: Play, world: int = 4) -> list[list[dict[str, Any]]]:
    """Return, for each play, every rank's result."""
    limit_s = 120.0 + 10 * len(plays)
    ranks = run_world(world, play_all, {**tiny(folder), **BASE}, list(plays), timeout_s=limit_s)
    return [list(outcomes) for outcomes in zip(*ranks, strict=True)]


def checkpoint(folder: Path, name: str, step: int) -> Path:
    return folder / "runs" / name / "checkpoints" / f"step-{step:08d}"


def assert_same_files(a: StorageLocation, b: StorageLocation) -> None:
    """Assert that two checkpoints have the same global tensors, bitwise."""
    first, second = Checkpoint.open(a), Checkpoint.open(b)
    assert first.names() == second.names()
    beside = ("stash.", "routing/")
    kinds = {name.split("/")[0] for name in first.names() if not name.startswith(beside)}
    assert kinds in (
        {"model", "optimizer.exp_avg", "optimizer.exp_avg_sq"},
        {"model", "optimizer.exp_avg"},  # lion
    )
    for name in first.names():
        assert torch.equal(first.read(name), second.read(name)), name


def assert_continues(
    parts: list[dict[str, Any]], whole: list[dict[str, Any]], steps: int = STEPS
) -> None:
    """Compare the ranks of a resumed run with those of the uninterrupted one of `steps` steps."""
    for part, full in zip(parts, whole, strict=True):
        assert part["error"] is None
        first = part["first_step"]
        assert sorted(part["steps"]) == list(range(first + 1, steps + 1))
        for step, result in part["steps"].items():
            assert result == full["steps"][step], step  # loss, norm, learning rate, tokens
        assert part["validation"] == full["validation"]
        for key in ("copies", "state"):
            for (*mine, x), (*theirs, y) in zip(part[key], full[key], strict=True):
                assert mine == theirs
                assert np.array_equal(x, y), mine


def save_as_loaded(world: World, settings: Mapping[str, str], source: str, target: str) -> str:
    """Load a checkpoint into a layout and save it from that layout."""
    given = {**settings, "checkpoint.load": source, "run.name": "again"}
    tokenizer = load_tokenizer("byte")
    config, layout = resolve(parse(arguments(given)).config, world.size, tokenizer.vocab_size)
    mesh = world.mesh(
        Grid(layout.pp, layout.dp, layout.cp, layout.tp, *layout.ep_sizes, layout.ranks_per_node)
    )
    with StopRequest() as stop:
        trainer = Trainer(config, layout, mesh, tokenizer, local_rank=world.rank, stop=stop)
    trainer.saving.checkpoints = Path(target)
    trainer.saving.save(trainer.context, trainer.first_step, wait=True)
    trainer.close()
    return str(Path(target) / f"step-{trainer.first_step:08d}")
