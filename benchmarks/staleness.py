"""The cost of stale weights in loss: ``python benchmarks/staleness.py``.

A small model on four pipeline stages learns the source text of Python's standard library, byte by
byte, synchronously and with every policy for stale weights (docs/streams.md), with adamw, nadamw
and muon. Weights, batches and tokens are the same for all, nothing is clipped, and each takes the
best of three learning rates by the first seed. The table has the validation loss, the mean of all
seeds and its largest deviation from that; its distance to synchronous training by the same rule,
seed by seed; and the loss after equal simulated time. Synchronous training flushes at every update,
so it makes fewer updates in the time of a no-flush schedule; it decays its learning rate over
these.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from common import Result, parser, report
from corpus import Rows, text
from rich.console import Console
from rich.table import Table

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layout.resolve import BYTE_VOCABULARY, resolve
from megapipe.schedule.async_schedules.load import load_async_schedule
from megapipe.schedule.async_schedules.times import window_times
from megapipe.schedule.cost import Cost
from megapipe.schedule.generators import build
from megapipe.schedule.timing.simulate import simulate
from megapipe.testing import World, run_world

RANKS = 4
MICROBATCHES = 4
RATES = {
    "adamw": (4e-3, 8e-3, 1.6e-2),
    "muon": (1e-2, 2e-2, 4e-2),
    "nadamw": (4e-3, 8e-3, 1.6e-2),
}
"""Learning rates by rule; each row takes the best."""


@dataclass(frozen=True)
class Size:
    hidden: int
    sequence: int
    batch: int
    """Rows of a micro-batch."""
    steps: int
    seeds: int
    validation: int
    """Samples of a validation."""


FULL = Size(hidden=64, sequence=64, batch=2, steps=250, seeds=3, validation=128)
TOY = Size(hidden=16, sequence=8, batch=1, steps=3, seeds=1, validation=4)
LAYERS = 6


@dataclass(frozen=True)
class Variant:
    """A way to read weights."""

    weights: str
    look_ahead: int = 0

    @property
    def name(self) -> str:
        return self.weights + (f", look_ahead {self.look_ahead}" if self.look_ahead else "")

    @property
    def schedule(self) -> str:
        return "two_group" if self.weights == "double_group" else "1f1b"

    @property
    def layout(self) -> str:
        """The layers of each stage: the same model for all."""
        if self.weights == "double_group":
            return "E | L | L | L | L | L | L | H"
        return "E L | L*2 | L*2 | L H"

    @property
    def window(self) -> float:
        """Simulated time of an update divided by that of its operations: a backward takes twice the
        time of a forward, and messages take none."""
        if self.weights == "synchronous":
            schedule = build(self.schedule, ranks=RANKS, microbatches=MICROBATCHES)
            return float(simulate(schedule).makespan) / (3 * MICROBATCHES)
        stream = load_async_schedule(
            self.schedule, self.weights, ranks=RANKS, microbatches=MICROBATCHES
        )
        cost = Cost.full_rank(stream.placement)
        return float(window_times(stream, cost).window) / (3 * MICROBATCHES)


SYNCHRONOUS = Variant("synchronous")
BUFFER, AHEAD = Variant("double_buffer"), Variant("double_buffer", look_ahead=1)
GROUP = Variant("double_group")
STREAMS = (
    *(BUFFER, AHEAD, GROUP, Variant("stash"), Variant("latest"), Variant("vertical")),
    *(Variant("predict"), Variant("correct")),
)
UNGUESSED = ("muon",)
"""Rules whose next weights cannot be predicted."""


@dataclass(frozen=True)
class Row:
    """Results of a way of training."""

    rule: str
    variant: Variant
    lr: float
    losses: tuple[float, ...]
    """Losses by seed."""
    distances: tuple[float, ...]
    """Distances to synchronous training."""
    at_equal_time: tuple[float, ...]
    """Losses in the simulated time that the updates of a no-flush schedule take."""

    @property
    def distance(self) -> float:
        return statistics.mean(self.distances)


class Losses:
    """Validation losses, nats per byte, after training."""

    def __init__(self, world: World, size: Size) -> None:
        self.world = world
        self.size = size
        self.data = text()

    def best(self, rule: str, variant: Variant, steps: int) -> tuple[float, tuple[float, ...]]:
        """Return the learning rate that is best for the first seed, and the losses of all seeds."""
        first = {lr: self._train(rule, variant, lr, 1, steps) for lr in RATES[rule]}
        lr = min(first, key=lambda each: first[each])
        seeds = range(2, self.size.seeds + 1)
        others = [self._train(rule, variant, lr, seed, steps) for seed in seeds]
        each = ", ".join(f"{loss:.4f}" for loss in (*first.values(), *others))
        print(f"{rule}, {variant.name}, {steps} updates, lr {lr:g} of {RATES[rule]}: {each}")
        sys.stdout.flush()
        return lr, (first[lr], *others)

    def _train(self, rule: str, variant: Variant, lr: float, seed: int, steps: int) -> float:
        size = self.size
        config = Config.model_validate(
            {
                "run": {"seed": seed},
                "model": {
                    "layers": LAYERS,
                    "hidden": size.hidden,
                    "heads": 4,
                    "dtype": "fp32",
                    "tied_embeddings": False,
                },
                "parallel": {"pp": RANKS},
                "pipeline": {
                    "schedule": variant.schedule,
                    "stage_layout": variant.layout,
                    "weight_versions": variant.weights,
                    "transport": "in_process",
                },
                "optimizer": {
                    "rule": rule,
                    "lr": lr,
                    "min_lr": lr / 10,
                    "warmup_steps": steps // 10,
                    "max_grad_norm": None,
                    "weight_prediction": variant.look_ahead,
                },
                "train": {
                    "steps": steps,
                    "sequence_length": size.sequence,
                    "global_batch": size.batch * MICROBATCHES,
                    "microbatch": size.batch,
                },
            }
        )
        config, layout = resolve(config, 1, BYTE_VOCABULARY)
        step = TrainStep(config, layout, self.world.mesh(Grid()))
        rows = Rows(self.data, size.sequence, seed)
        for i in range(steps):
            step.train(i, rows)
        step.settle()
        return step.evaluate(rows.validation, size.validation)[0]


def measure(world: World, size: Size) -> list[Row]:
    losses, rows = Losses(world, size), []
    for rule in RATES:
        lr, plain = losses.best(rule, SYNCHRONOUS, size.steps)
        fewer = max(1, round(size.steps * BUFFER.window / SYNCHRONOUS.window))
        _, sooner = losses.best(rule, SYNCHRONOUS, fewer)
        rows.append(Row(rule, SYNCHRONOUS, lr, plain, (0.0,) * len(plain), sooner))
        for variant in STREAMS:
            if rule in UNGUESSED and (variant.look_ahead or variant.weights == "predict"):
                continue
            lr, found = losses.best(rule, variant, size.steps)
            distances = tuple(a - b for a, b in zip(found, plain, strict=True))
            rows.append(Row(rule, variant, lr, found, distances, found))
            assert variant.window == BUFFER.window, "which makes as many updates in its time"
    return rows


def results(rows: Sequence[Row]) -> list[Result]:
    """Return the claims on adamw and muon, and each no-flush schedule's loss against synchronous
    training of as much time."""
    by_name = {(row.rule, row.variant): row for row in rows}
    unit = "nats of validation loss above synchronous training"
    buffer, muons = (by_name[rule, BUFFER].distance for rule in ("adamw", "muon"))
    found = [
        Result(claim, value, buffer, unit, "adamw, double_buffer")
        for claim, value in (
            ("adamw, double_group: distance", by_name["adamw", GROUP].distance),
            ("adamw, double_buffer with look_ahead 1: distance", by_name["adamw", AHEAD].distance),
            ("muon, double_buffer: distance", muons),
        )
    ]
    for row in rows:
        if row.variant != SYNCHRONOUS:
            plain = by_name[row.rule, SYNCHRONOUS]
            found.append(
                Result(
                    f"{row.rule}, {row.variant.name}: loss at equal simulated time",
                    statistics.mean(row.at_equal_time),
                    statistics.mean(plain.at_equal_time),
                    f"nats; {statistics.mean(row.losses):.3f} +-{spread(row.losses):.2g}, "
                    f"{row.distance:+.3f} of synchronous, lr {row.lr:g}",
                    f"{row.rule}, synchronous",
                )
            )
    return found


def spread(values: Sequence[float]) -> float:
    mean = statistics.mean(values)
    return max(abs(value - mean) for value in values)


def show(rows: Sequence[Row]) -> None:
    table = Table(title="Validation loss, nats per byte", title_justify="left")
    headings = ("rule", "weights", "lr", "loss", "spread", "distance", "time", "at equal time")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in headings[:2] else "right")
    for row in rows:
        table.add_row(
            *(row.rule, row.variant.name, f"{row.lr:g}"),
            *(f"{statistics.mean(row.losses):.3f}", f"{spread(row.losses):.3f}"),
            *(f"{row.distance:+.3f}", f"{row.variant.window:.2f}"),
            f"{statistics.mean(row.at_equal_time):.3f}",
        )
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0]).parse_args(argv)
    size = TOY if given.quick else FULL
    (rows,) = run_world(1, measure, size, timeout_s=4 * 3600.0)
    show(rows)
    report("Training with stale weights", results(rows), given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
