"""One value that is not finite, put on one rank into a weight, a gradient, an activation or a
state."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import torch

from megapipe.optim.shard import Shard
from megapipe.train.callbacks import Run
from tests.campaigns.rank import Fault

KINDS = ("weight", "master", "gradient", "sum", "activation", "state")
"""A weight as the model computes with it; its master copy; a gradient of one replica; the sum of
them; the output of a module; a state of the optimizer."""
OUTPUTS = 16
"""Number of module outputs that each rank has in a step, at least."""


class Poison(Fault):
    """Puts `value` into a place of a `kind` that `seed` draws, in the step."""

    def __init__(
        self, folder: Path, rank: int, step: int, kind: str, value: str, seed: int
    ) -> None:
        super().__init__(folder, rank, step)
        self._kind, self._value, self._draw = kind, float(value), random.Random(seed)

    def arm(self, run: Run) -> None:
        if self._kind == "activation":
            self._hook(run)
            return
        shard = self._draw.choice(run.train_step.optimizer.shards)
        if self._kind in ("gradient", "sum"):
            self._await(shard)
            return
        if self._kind == "weight":
            values = shard.weights
        elif self._kind == "master":
            values = shard.store.read("model", 0, shard.stop - shard.start)
        else:
            name = self._draw.choice(run.train_step.optimizer.rule.states)
            values = shard.store.read(name, 0, shard.stop - shard.start)
        self._put(values)

    def _await(self, shard: Shard) -> None:
        """Poison gradients when they are about to be reduced, or have been."""
        name = "start_reduce" if self._kind == "gradient" else "finish_reduce"
        real = getattr(shard, name)

        def call() -> None:
            if self._kind == "gradient" and self.armed:
                self._put(shard.bucket.grads[0])
            real()
            if self._kind == "sum" and self.armed and len(shard.grad):
                self._put(shard.grad)

        setattr(shard, name, call)

    def _hook(self, run: Run) -> None:
        """Poison one of the first outputs of modules in the forwards that follow."""
        left = itertools.count(self._draw.randrange(OUTPUTS), -1)

        def spoil(module: torch.nn.Module, args: Any, output: Any) -> Any:
            if not (isinstance(output, torch.Tensor) and output.is_floating_point()):
                return output
            if next(left) != 0:
                return output
            changed = output.clone()
            self._put(changed.detach())
            return changed

        for stage in run.train_step.modules.values():
            for module in stage.modules():
                module.register_forward_hook(spoil)

    @torch.no_grad()
    def _put(self, values: torch.Tensor) -> None:
        values.view(-1)[self._draw.randrange(values.numel())] = self._value
        self.struck()
