"""A callback that spoils numbers of a run, on one rank and in chosen steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megapipe.train.callbacks import Callback, Run, Step

What = Literal["loss", "gradient", "state"]


@dataclass
class Poison(Callback):
    """Multiplies a number on `rank` by `factor` in every step that takes samples of [first, stop).

    loss: that of a micro-batch; gradient: one value of each shard; state: one of the optimizer's,
    before the step.
    """

    what: What
    rank: int
    first: int
    stop: int
    factor: float = math.nan

    def begin(self, run: Run) -> None:
        self._acts = False
        step = run.train_step
        for shard in step.optimizer.shards:
            self._spoil_gradients(shard)
        own_loss = step._own_loss

        def spoiled(counted: Any) -> tuple[Tensor, Any]:
            if self._acts and self.what == "loss" and step.last is not None:
                step.last.loss_sums[min(step.last.loss_sums)] *= self.factor
            return own_loss(counted)

        step._own_loss = spoiled  # type: ignore[method-assign]

    def _spoil_gradients(self, shard: Any) -> None:
        finish = shard.finish_reduce

        def spoiled() -> None:
            finish()
            if self._acts and self.what == "gradient":
                shard.grad[0] *= self.factor

        shard.finish_reduce = spoiled

    def before_step(self, run: Run, step: Step) -> None:
        train = run.train_step
        taken = range(train.samples(step.number - 1), train.samples(step.number))
        numbers = map(train.left_out.number, taken)
        here = run.mesh.rank == self.rank
        self._acts = here and any(self.first <= number < self.stop for number in numbers)
        if self._acts and self.what == "state":
            for shard in train.optimizer.shards:
                name = train.optimizer.rule.states[-1]
                shard.store.read(name, 0, 1).mul_(0).add_(self.factor)

    def after_step(self, run: Run, step: Step) -> None:
        self._acts = False
