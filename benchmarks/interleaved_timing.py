"""Steps of several trainers of one model, timed by turns in the processes of a world."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe import TrainStep

Rows = Callable[[Sequence[int]], tuple[Tensor, Tensor, Tensor]]
"""Function that returns tokens, labels and mask of samples."""
WARM_UP, SAME = 3, 2e-6
"""Steps that are compared and not timed, and the largest relative difference of their losses."""


class Batch(NamedTuple):
    vocabulary: int
    samples: int
    microbatch: int
    sequence: int


def batches(batch: Batch) -> Callable[[int], Rows]:
    """Return a function for the rows of each step: the same few batches over and over."""
    generator = torch.Generator().manual_seed(0)
    shape = (WARM_UP, batch.samples, batch.sequence + 1)
    tokens = torch.randint(batch.vocabulary, shape, generator=generator)
    mask = torch.ones(batch.microbatch, batch.sequence, dtype=torch.bool)

    def of_step(i: int) -> Rows:
        def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
            taken = tokens[i % WARM_UP, [index % batch.samples for index in indices]]
            return taken[:, :-1], taken[:, 1:], mask

        return rows

    return of_step


def timed(sides: Sequence[Callable[[int], object]], rounds: int) -> list[list[float]]:
    """Return seconds of each round, by side; all ranks begin a call, which has the number of the
    round, at once."""
    seconds: list[list[float]] = [[] for _ in sides]
    for i in range(rounds):
        for turn in range(len(sides)):
            side = (i + turn) % len(sides)
            dist.barrier()
            start = time.perf_counter()
            sides[side](i)
            seconds[side].append(time.perf_counter() - start)
    return seconds


def in_turns(
    steps: Sequence[TrainStep],
    batch: Batch,
    rounds: int,
    *others: Callable[[int], object],
) -> list[list[float]]:
    """Return seconds of each round, by trainer and then of the `others`. Losses of the first steps
    are compared before."""
    rows = batches(batch)

    def train(step: TrainStep, i: int) -> float:
        (result,) = step.train(i, rows(i))
        return result.loss

    for i in range(WARM_UP):
        losses = [train(step, i) for step in steps]
        assert max(losses) - min(losses) <= SAME * losses[0], f"step {i}: losses {losses}"

    def side(step: TrainStep) -> Callable[[int], float]:
        return lambda i: train(step, WARM_UP + i)

    return timed([*map(side, steps), *others], rounds)
