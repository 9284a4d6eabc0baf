"""The loss over held-out samples, batch after batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.data.batch import Samples
from megapipe.train.step.evaluation import MICROBATCHES, Evaluator, ValidationResult


class Evaluated:
    """A step of two samples a micro-batch whose sums, by `total`, may have those of other ranks;
    it notes the samples that were computed."""

    def __init__(self, value: Any = True, total: Callable[[Tensor], Tensor] = Tensor.clone) -> None:
        self.seen: list[int] = []
        self.programs = 0
        self._value = value
        machine: Any = SimpleNamespace(
            config=SimpleNamespace(train=SimpleNamespace(microbatch=2)),
            layout=SimpleNamespace(dp=1),
            mesh=SimpleNamespace(ordered_sum=lambda vector, *axes: total(vector)),
            optimizer=SimpleNamespace(use_master_weights=nullcontext),
        )
        unused: Any = None
        self._evaluator = Evaluator(machine, unused, unused)
        self._evaluator.run_forward = self._run_forward  # type: ignore[method-assign]

    def evaluate(self, stop: Callable[[], bool]) -> ValidationResult:
        """Evaluate 301 samples."""
        return self._evaluator.evaluate(self.rows, 301, stop)

    def rows(self, indices: Sequence[int]) -> Samples:
        tokens = torch.tensor(list(indices)).unsqueeze(1)
        kind = torch.bool if self._value is True else torch.uint8
        return Samples(tokens, tokens, torch.full(tokens.shape, self._value, dtype=kind))

    def _run_forward(self, given: Any, first: int, microbatches: int) -> tuple[float, int]:
        assert microbatches <= MICROBATCHES
        self.programs += 1
        found = given(range(first, first + 2 * microbatches))
        kept = found.mask != 0
        assert (found.mask[kept] == self._value).all()
        self.seen.extend(found.tokens[kept].tolist())
        return float(found.tokens[kept].sum()), int(kept.sum())


@pytest.mark.parametrize("value", [True, 2, 5])
def test_every_sample_counts_once_and_none_beyond_the_last(value: Any) -> None:
    """So it is where the mask says of which source a token is."""
    given = Evaluated(value)
    found = given.evaluate(lambda: False)
    assert given.seen == list(range(301))
    assert (found.loss, found.tokens, found.stopped) == (150.0, 301, False)


@pytest.mark.parametrize("own", [True, False])
def test_a_request_to_stop_ends_it_after_the_program_in_which_it_comes(own: bool) -> None:
    """It may come to this rank or to another one."""

    def asked() -> bool:
        return given.programs == 2

    def with_others(sums: Tensor) -> Tensor:
        return sums + torch.tensor([0.0, 0.0, asked() and not own])

    given = Evaluated(total=with_others)
    found = given.evaluate(lambda: own and asked())
    assert given.programs == 2
    assert given.seen == list(range(2 * 2 * MICROBATCHES))
    assert math.isnan(found.loss)
    assert (found.tokens, found.stopped) == (len(given.seen), True)
