"""The cost of optimizer state in bf16 in loss: ``python benchmarks/state_precision.py``.

A small model learns the source text of Python's standard library, byte by byte, several times over:
with all state in fp32, with Adam's moments in bf16, rounded at random or to the nearest value, and
with bf16 weights without master weights. Initial weights and batches are the same, so the
validation losses can be compared pair by pair. The table has their mean difference over some seeds,
with its largest deviation from it. With beta2 = 0.999 the second moment shrinks by less per step
than half of bf16's spacing: rounded to the nearest value it can only grow.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from common import Result, parser, report
from corpus import Rows, text

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layout.resolve import BYTE_VOCABULARY, resolve
from megapipe.testing import World, run_world

TARGET = 0.01
"""Largest excess in nats of the validation loss over that with fp32 state."""
VALIDATION_SAMPLES = 256


@dataclass(frozen=True)
class Size:
    layers: int
    hidden: int
    sequence: int
    batch: int
    steps: int
    seeds: int


FULL = Size(layers=2, hidden=64, sequence=64, batch=8, steps=300, seeds=2)
TOY = Size(layers=1, hidden=16, sequence=8, batch=2, steps=2, seeds=1)


@dataclass(frozen=True)
class Variant:
    """A way to keep weights and state."""

    dtype: str
    beta2: float
    optimizer: tuple[tuple[str, Any], ...] = ()

    def with_state(self, **optimizer: Any) -> Variant:
        return replace(self, optimizer=tuple(optimizer.items()))


def configuration(size: Size, variant: Variant, seed: int) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": seed},
            "model": {
                "layers": size.layers,
                "hidden": size.hidden,
                "heads": 4,
                "dtype": variant.dtype,
            },
            "optimizer": {
                "lr": 3e-3,
                "min_lr": 3e-4,
                "warmup_steps": size.steps // 10,
                "options": {"betas": [0.9, variant.beta2]},
                **dict(variant.optimizer),
            },
            "train": {
                "steps": size.steps,
                "sequence_length": size.sequence,
                "global_batch": size.batch,
                "microbatch": size.batch,
            },
        }
    )


class Losses:
    """Validation losses, nats per byte, after training; each is measured once."""

    def __init__(self, world: World, size: Size) -> None:
        self.world = world
        self.size = size
        self.data = text()
        self.measured: dict[Variant, list[float]] = {}

    def of(self, variant: Variant) -> list[float]:
        """Return one loss per seed."""
        if variant not in self.measured:
            seeds = range(1, self.size.seeds + 1)
            self.measured[variant] = [self._train(variant, seed) for seed in seeds]
        return self.measured[variant]

    def _train(self, variant: Variant, seed: int) -> float:
        config, layout = resolve(configuration(self.size, variant, seed), 1, BYTE_VOCABULARY)
        step = TrainStep(config, layout, self.world.mesh(Grid()))
        rows = Rows(self.data, self.size.sequence, seed)
        for i in range(self.size.steps):
            step.train(i, rows)
        return step.evaluate(rows.validation, VALIDATION_SAMPLES)[0]

    def more(self, claim: str, variant: Variant, *, at_least: bool = False) -> Result:
        """Return the additional loss of `variant` compared with the same weights and all state in
        fp32."""
        plain = self.of(variant.with_state())
        above = [a - b for a, b in zip(self.of(variant), plain, strict=True)]
        mean = statistics.mean(above)
        spread = max(abs(difference - mean) for difference in above)
        return Result(
            claim=claim,
            value=mean,
            target=TARGET,
            unit=f"nats of validation loss more, each seed +-{spread:.1g}",
            peer=f"{variant.dtype} model, state in fp32: {statistics.mean(plain):.4f} nats",
            at_least=at_least,
        )


def measure(world: World, size: Size) -> list[Result]:
    losses = Losses(world, size)
    results = []
    for beta2 in (0.95, 0.999):
        for rounding in ("stochastic", "nearest"):
            variant = Variant("fp32", beta2).with_state(state_dtype="bf16", rounding=rounding)
            results.append(losses.more(f"bf16 moments, {rounding}, beta2 {beta2}", variant))
    without = Variant("bf16", 0.95).with_state(master_weights="none", rounding="stochastic")
    results.append(losses.more("bf16 weights without masters, stochastic", without))
    without = without.with_state(master_weights="none", rounding="nearest")
    claim = "bf16 weights without masters, nearest: learns less"
    results.append(losses.more(claim, without, at_least=True))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0]).parse_args(argv)
    size = TOY if given.quick else FULL
    (results,) = run_world(1, measure, size, timeout_s=1800.0)
    report("Optimizer state in bf16", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
