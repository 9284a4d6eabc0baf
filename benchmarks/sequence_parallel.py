"""Sequence parallelism beside plain tensor parallelism: ``python benchmarks/sequence_parallel.py``.

Two processes on gloo train the same model from the same weights on the same batches, with and
without ``parallel.sequence_parallel``, by turns within one run. An all-reduce of the hidden states
becomes a gather and a reduce-scatter of as many bytes, norms are computed once instead of twice,
and the weight gradients gather again what was not kept (Korthikanti et al., 2205.05198). Losses of
the first steps are compared before anything is timed. A ratio is the median over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from common import Result, parser, report

from megapipe.config import Config
from megapipe.layout import resolve
from megapipe.mesh import Grid, ParallelMesh
from megapipe.testing import World, run_world
from megapipe.train.step import TrainStep

TP, VOCABULARY = 2, 4096
WARM_UP, SAME = 3, 2e-6
"""Steps that are compared and not timed, and how far their losses may be apart, relatively."""


class Size(NamedTuple):
    hidden: int
    sequence: int
    microbatch: int
    layers: int = 4
    microbatches: int = 4


SIZES = (Size(256, 256, 1), Size(128, 128, 4), Size(64, 64, 1))
QUICK = (Size(16, 8, 1, 1, 1),)


def new_step(size: Size, mesh: ParallelMesh, *, split: bool) -> TrainStep:
    config = Config.model_validate(
        {
            "model": {
                "layers": size.layers,
                "hidden": size.hidden,
                "heads": 4,
                "vocab_size": VOCABULARY,
            },
            "parallel": {"tp": TP, "sequence_parallel": split},
            "train": {
                "sequence_length": size.sequence,
                "microbatch": size.microbatch,
                "global_batch": size.microbatch * size.microbatches,
            },
        }
    )
    return TrainStep(*resolve(config, TP, VOCABULARY), mesh)


def times(world: World, size: Size, rounds: int) -> list[list[float]]:
    """Seconds of each round, with sequence parallelism and without."""
    mesh = world.mesh(Grid(tp=TP))
    sides = [new_step(size, mesh, split=split) for split in (True, False)]
    samples = size.microbatch * size.microbatches
    generator = torch.Generator().manual_seed(0)
    shape = (WARM_UP, samples, size.sequence + 1)
    tokens = torch.randint(VOCABULARY, shape, generator=generator)
    mask = torch.ones(size.microbatch, size.sequence, dtype=torch.bool)

    def train(side: TrainStep, i: int) -> float:
        def rows(indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            batch = tokens[i % WARM_UP, [index % samples for index in indices]]
            return batch[:, :-1], batch[:, 1:], mask

        result = side.train(i, rows)
        assert result is not None
        return result.loss

    for i in range(WARM_UP):
        with_, without = (train(side, i) for side in sides)
        assert abs(with_ - without) <= SAME * without, f"step {i}: losses {with_}, {without}"
    seconds: list[list[float]] = [[], []]
    for i in range(rounds):
        for turn in (0, 1) if i % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            train(sides[turn], WARM_UP + i)
            seconds[turn].append(time.perf_counter() - start)
    return seconds


def measure(size: Size, rounds: int) -> Result:
    ranks = run_world(TP, times, size, rounds)
    by_side = zip(*ranks, strict=True)
    ours, theirs = (list(map(max, zip(*side, strict=True))) for side in by_side)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    tokens = size.sequence * size.microbatch
    print(f"hidden {size.hidden}, {tokens} tokens: {statistics.median(theirs) * 1e3:.1f} ms a step")
    claim = f"step with sequence_parallel, hidden {size.hidden}, {tokens} tokens per micro-batch"
    return Result(claim, ratio, 1.15, "x", f"plain tp {TP}")


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=40, help="timed steps per side (40)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    sizes, rounds = (QUICK, 2) if given.quick else (SIZES, given.rounds)
    report("Sequence parallelism", [measure(size, rounds) for size in sizes], given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
