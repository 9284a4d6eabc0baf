"""Memory that a process holds of the model itself, measured for :mod:`memory`: every ZeRO stage.

Real worlds of gloo processes train a step. The storages of weights, gradients and optimizer state
are added up when the step is over, and each time one of them gets memory during it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from common import Result
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.errors import ConfigError
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.optim.buffers import Bucket
from megapipe.optim.shard import Shard
from megapipe.optim.state_store import StateStore
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory import model_memory
from megapipe.testing import World, run_world

PP, MICROBATCHES, ROWS, SEQUENCE, VOCABULARY = 2, 4, 2, 8, 257
"""Sizes that are as small as every schedule allows."""
SHARING = 2
"""Ranks that hold the same weights, except for their experts: over dp, or over cp."""
TOLERANCE = 0.02
EXPERTS = {"num_experts": 4, "expert_ffn_hidden": 32, "first_dense_layers": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "zero 0": {"optimizer": {"zero": 0}},
    "zero 1": {"optimizer": {"zero": 1}},
    "zero 2": {"optimizer": {"zero": 2}},
    "zero 3": {"optimizer": {"zero": 3}},
    "zero 3, prefetch 0, bf16": {
        "optimizer": {"zero": 3, "weight_prefetch": 0},
        "model": {"dtype": "bf16"},
    },
    "zero 1, bf16 states": {
        "optimizer": {"zero": 1, "state_dtype": "bf16"},
        "model": {"dtype": "bf16"},
    },
    "zero 1, lion, no masters": {
        "optimizer": {"rule": "lion", "master_weights": "none"},
        "model": {"dtype": "bf16"},
    },
    "zero 1, post-validation": {"optimizer": {"post_validation": True}},
    **{f"cp 2, zero {n}": {"optimizer": {"zero": n}, "parallel": {"cp": 2}} for n in range(4)},
    "experts, ep 2, zero 2": {
        "optimizer": {"zero": 2},
        "parallel": {"ep": 2},
        "model": {"moe": EXPERTS},
    },
    "experts, edp 2, zero 2": {
        "optimizer": {"zero": 2},
        "model": {"moe": EXPERTS, "dtype": "bf16"},
    },
    "experts, edp 2, zero 3": {"optimizer": {"zero": 3}, "model": {"moe": EXPERTS}},
}
"""Settings by name. With ep 2 a rank's experts are on no other; with edp 2 two have the same
ones."""


def configure(schedule: str, setting: dict[str, Any]) -> tuple[Config, Layout]:
    model = {"layers": 8, "hidden": 32, "heads": 4, "vocab_size": VOCABULARY}
    grid = grid_of(setting)
    config = Config.model_validate(
        {
            "model": {**model, **setting.get("model", {})},
            "parallel": {
                "pp": PP,
                "dp": grid.dp,
                "cp": grid.cp,
                "ep": grid.ep,
                "device": "cpu",
            },
            "pipeline": {"schedule": schedule},
            "optimizer": setting["optimizer"],
            "train": {
                "sequence_length": SEQUENCE,
                "microbatch": ROWS,
                "global_batch": MICROBATCHES * ROWS * grid.dp,
            },
        }
    )
    return resolve(config, SHARING * PP, VOCABULARY, measure=BY_UNITS)


def grid_of(setting: dict[str, Any]) -> Grid:
    parallel = setting.get("parallel", {})
    cp, ep = parallel.get("cp", 1), parallel.get("ep", 1)
    return Grid(pp=PP, dp=SHARING // cp, cp=cp, ep=ep)


def storages(step: TrainStep) -> dict[int, int]:
    """Return bytes by storage of all that belongs to the model: weights, gradients and states."""
    tensors: list[Tensor] = []
    for shard in step.optimizer.shards:
        bucket, store = shard.bucket, shard.store
        tensors += [bucket.weights, shard.weights, *bucket.grads, *bucket.early_grads, shard.grad]
        tensors += [store.read(name, 0, 0) for name in ("model", *step.optimizer.rule.states)]
    held = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in held}


def kept(step: TrainStep) -> int:
    """Return the bytes of the copies from which an update could be undone."""
    return sum(copy.nbytes for shard in step.optimizer.shards for copy in shard.store.kept)


def measure(world: World, cases: list[tuple[str, str]]) -> list[tuple[int, int]]:
    """Return for each case (schedule, setting) bytes held after a step, and the most during it."""
    found = []
    for schedule, setting in cases:
        config, layout = configure(schedule, SETTINGS[setting])
        mesh = world.mesh(grid_of(SETTINGS[setting]))
        found.append(_measured(TrainStep(config, layout, mesh)))
    return found


def _measured(step: TrainStep) -> tuple[int, int]:
    peak = 0

    def noting(method: Any) -> Any:
        def noted(self: Any, *args: Any) -> Any:
            nonlocal peak
            result = method(self, *args)
            peak = max(peak, sum(storages(step).values()) + kept(step))
            return result

        return noted

    def rows(indices: Any) -> tuple[Tensor, Tensor, Tensor]:
        tokens = torch.tensor([[i + j for j in range(SEQUENCE)] for i in indices]) % VOCABULARY
        return tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)

    with (
        mock.patch.object(Bucket, "alloc_grads", noting(Bucket.alloc_grads)),
        mock.patch.object(Bucket, "alloc_weights", noting(Bucket.alloc_weights)),
        mock.patch.object(Shard, "finish_reduce", noting(Shard.finish_reduce)),
        mock.patch.object(StateStore, "snapshot", noting(StateStore.snapshot)),
    ):
        step.train(0, rows)
        step.settle()
        for shard in step.optimizer.shards:
            shard.grad = torch.empty(0)
    return sum(storages(step).values()), peak


def compare(schedules: Sequence[str], refused: list[str]) -> Iterator[Result]:
    """Yield the largest relative differences of any rank and schedule, per setting.

    Adds to `refused` the layout's messages about schedules that do not go with a setting.
    """
    cases = []
    for setting in SETTINGS:
        for schedule in schedules:
            try:
                configure(schedule, SETTINGS[setting])
            except ConfigError as error:
                refused.append(f"{setting}: {error}")
            else:
                cases.append((schedule, setting))
    ranks = run_world(SHARING * PP, measure, cases, timeout_s=60 + 5 * len(cases))
    for setting in SETTINGS:
        worst: dict[str, tuple[float, str]] = dict.fromkeys(("lasting", "peak"), (0.0, ""))
        compared = 0
        for index, (schedule, of) in enumerate(cases):
            if of != setting:
                continue
            compared += 1
            config, layout = configure(schedule, SETTINGS[setting])
            for rank, found in enumerate(ranks):
                formula = model_memory(config, layout, rank // SHARING)
                wanted = formula.persistent, formula.total
                for what, measured, predicted in zip(worst, found[index], wanted, strict=True):
                    difference = abs(measured - predicted) / predicted
                    worst[what] = max(worst[what], (difference, f": {schedule}, rank {rank}"))
        assert compared, f"{setting}: every schedule is refused"
        for what, (difference, where) in worst.items():
            yield Result(
                claim=f"{setting}: parameters, gradients, states, {what}",
                value=100 * difference,
                target=100 * TOLERANCE,
                unit="% off",
                peer=f"formula, {compared} schedules{where if difference else ''}",
            )
