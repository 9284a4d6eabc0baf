"""Steps of several trainers of one model, timed by turns in the processes of a world."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.train.step import TrainStep

WARM_UP, SAME = 3, 2e-6
"""Steps that are compared and not timed, and how far their losses may be apart, relatively."""


class Batch(NamedTuple):
    vocabulary: int
    samples: int
    microbatch: int
    sequence: int


def in_turns(steps: Sequence[TrainStep], batch: Batch, rounds: int) -> list[list[float]]:
    """Seconds of each round, by trainer. Losses of the first steps are compared before."""
    generator = torch.Generator().manual_seed(0)
    shape = (WARM_UP, batch.samples, batch.sequence + 1)
    tokens = torch.randint(batch.vocabulary, shape, generator=generator)
    mask = torch.ones(batch.microbatch, batch.sequence, dtype=torch.bool)

    def train(step: TrainStep, i: int) -> float:
        def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
            taken = tokens[i % WARM_UP, [index % batch.samples for index in indices]]
            return taken[:, :-1], taken[:, 1:], mask

        (result,) = step.train(i, rows)
        return result.loss

    for i in range(WARM_UP):
        losses = [train(step, i) for step in steps]
        assert max(losses) - min(losses) <= SAME * losses[0], f"step {i}: losses {losses}"
    seconds: list[list[float]] = [[] for _ in steps]
    for i in range(rounds):
        for turn in range(len(steps)):
            side = (i + turn) % len(steps)
            dist.barrier()
            start = time.perf_counter()
            train(steps[side], WARM_UP + i)
            seconds[side].append(time.perf_counter() - start)
    return seconds
