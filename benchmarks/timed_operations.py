"""Real training steps of a tiny model, each of whose operations lasts a given time.

An operation sleeps for the time that it does not compute, so many ranks show their true bubbles on
few cores. Ranks whose operations begin together compute at different times within them, so that no
message waits for the cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.stage import Key, Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.measurements import BY_UNITS
from megapipe.schedule.ir import Kind
from megapipe.train import train_step as training

VOCABULARY = 64
SLACK = 2e-4
"""Seconds by which the system may wake up a sleeper late."""
LATEST = 0.7
"""Share of an operation after which the last rank computes it."""
Seconds = Mapping[Kind, float]
"""Seconds of F, I and W."""


class _Lasting(Stage):
    def __init__(self, *args: Any, seconds: Seconds, place: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seconds = seconds
        self.place = place

    def _last(self, kind: Kind, operation: Callable[[], Tensor | None]) -> Tensor | None:
        end = time.perf_counter() + self.seconds[kind]
        time.sleep(self.place * self.seconds[kind])
        result = operation()
        time.sleep(max(0.0, end - time.perf_counter() - SLACK))
        while time.perf_counter() < end:
            pass
        return result

    def forward(self, key: Key, x: Tensor | None, mb: MicroBatch) -> Tensor | None:
        return self._last(Kind.F, partial(super().forward, key, x, mb))

    def input_grad(self, key: Key, grad: Tensor | None) -> Tensor | None:
        return self._last(Kind.I, partial(super().input_grad, key, grad))

    def weight_grad(self, key: Key) -> None:
        self._last(Kind.W, partial(super().weight_grad, key))


def lasting(seconds: Seconds, mesh: ParallelMesh) -> mock._patch[Any]:
    """Patch the stages of a step that is made meanwhile: each operation lasts `seconds`."""
    place = LATEST * mesh.pp.index / mesh.pp.size
    return mock.patch.object(training, "Stage", partial(_Lasting, seconds=seconds, place=place))


def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return samples [b, 8]: each counts up from its number."""
    tokens = (torch.tensor(indices)[:, None] + torch.arange(9)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:], torch.ones(len(tokens), 8, dtype=torch.bool)


def configured(
    ranks: int, *, layers: int, microbatches: int, steps: int, **given: Mapping[str, object]
) -> tuple[Config, Layout]:
    """Return a pipeline of `ranks` ranks; `given` are further keys by section."""
    sections: dict[str, dict[str, object]] = {
        "model": {"layers": layers, "hidden": 16, "heads": 2, "tied_embeddings": False},
        "parallel": {"pp": ranks},
        "optimizer": {"warmup_steps": 0},
        "train": {
            "steps": steps,
            "sequence_length": 8,
            "microbatch": 1,
            "global_batch": microbatches,
        },
    }
    for section, keys in given.items():
        sections[section] = {**sections.get(section, {}), **keys}
    return resolve(Config.model_validate(sections), ranks, VOCABULARY, measure=BY_UNITS)
