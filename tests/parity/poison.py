"""A callback that changes values of a run, on one rank and in chosen steps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from megapipe.train.callbacks import Callback, Run, Step

What = Literal["loss", "gradient", "state"]


@dataclass
class Poison(Callback):
    """Multiplies a value on `rank` by `factor` in every step that takes samples of [first, stop).

    loss: a micro-batch's loss; gradient: one value of each shard; state: one of the optimizer's,
    before the step. If a step is computed several times, only the first `times` are changed.
    """

    what: What
    rank: int
    first: int
    stop: int
    factor: float = math.nan
    times: int = 10**6

    def begin(self, run: Run) -> None:
        self._computed: Counter[int] = Counter()
        """Number of times that each affected step was computed."""
        self._step = -1
        """Step that is being computed; -1 if it is not affected."""
        step = run.train_step
        self._watch(run, step._feed, step.optimizer)
        for shard in step.optimizer.shards:
            self._spoil_gradients(shard)
        own_loss = step.totals.own_loss

        def spoiled(counted: Any) -> tuple[Tensor, Any]:
            if self._spoils("loss") and step.last is not None:
                step.last.loss_sums[min(step.last.loss_sums)] *= self.factor
            return own_loss(counted)

        step.totals.own_loss = spoiled  # type: ignore[method-assign]

    def _watch(self, run: Run, feed: Any, optimizer: Any) -> None:
        """Note which step is computed: data are fetched, then gradients start at 0."""
        fetch, begin = feed.fetch, optimizer.zero_grad

        def fetched(schedule: Any, rows: Any, step: int, first: int, *more: Any) -> Any:
            trains = bool(more)  # a validation has neither scale nor samples that are left out
            self._step = step if trains and self._hits(run, step) else -1
            return fetch(schedule, rows, step, first, *more)

        def begun() -> None:
            self._computed[self._step] += 1
            begin()

        feed.fetch, optimizer.zero_grad = fetched, begun

    def _hits(self, run: Run, step: int) -> bool:
        train = run.train_step
        taken = range(train.samples(step), train.samples(step + 1))
        numbers = map(train.skipped_samples.number_after, taken)
        return run.mesh.rank == self.rank and any(self.first <= n < self.stop for n in numbers)

    def _spoils(self, what: What) -> bool:
        return self._step >= 0 and what == self.what and self._computed[self._step] <= self.times

    def _spoil_gradients(self, shard: Any) -> None:
        finish = shard.finish_reduce

        def spoiled() -> None:
            finish()
            if self._spoils("gradient"):
                shard.grad[0] *= self.factor

        shard.finish_reduce = spoiled

    def before_step(self, run: Run, step: Step) -> None:
        if self.what == "state" and self._hits(run, step.number - 1):
            optimizer = run.train_step.optimizer
            for shard in optimizer.shards:
                shard.store.read(optimizer.rule.states[-1], 0, 1).fill_(self.factor)
