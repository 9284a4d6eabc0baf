"""Tensor parallelism with two processes on gloo: ``python benchmarks/tensor_parallel.py``.

The same model is trained from the same weights on the same batches in four ways, by turns within
one run: with and without ``parallel.sequence_parallel``, and with collectives that overlap with
weight gradients or are waited for where they start (``kernels.tp_comm_overlap=false``). With
sequence parallelism an all-reduce of the hidden states becomes an all-gather and a reduce-scatter
of as many bytes, norms are computed once instead of twice, and the weight gradients gather again
what was not saved (Korthikanti et al., 2205.05198). Losses of the first steps are compared before
anything is timed. A ratio is the median over the rounds.

The exchanges of a step are also timed by themselves in the same turns: as many collectives of as
many bytes, one after the other, with nothing between them.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from common import Result, parser, report
from interleaved_timing import Batch, in_turns

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.collectives import all_gather, all_reduce, reduce_scatter
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units
from megapipe.testing import World, run_world

TP, VOCABULARY = 2, 4096
ROUTINES: dict[str, Callable[[torch.Tensor, Axis], torch.Tensor]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
}


class Size(NamedTuple):
    hidden: int
    sequence: int
    microbatch: int
    layers: int = 4
    microbatches: int = 4


SIZES = (Size(256, 256, 1), Size(128, 128, 4), Size(64, 64, 1))
QUICK = (Size(16, 8, 1, 1, 1),)


class Side(NamedTuple):
    split: bool
    """Whether sequence parallelism is on."""
    overlap: bool


SIDES = [Side(split, overlap) for split in (True, False) for overlap in (True, False)]
SPLIT, PLAIN = (Side(split, overlap=True) for split in (True, False))


def laid_out(size: Size, side: Side) -> tuple[Config, Layout]:
    config = Config.model_validate(
        {
            "model": {
                "layers": size.layers,
                "hidden": size.hidden,
                "heads": 4,
                "vocab_size": VOCABULARY,
            },
            "parallel": {"tp": TP, "sequence_parallel": side.split},
            "kernels": {"tp_comm_overlap": side.overlap},
            "train": {
                "sequence_length": size.sequence,
                "microbatch": size.microbatch,
                "global_batch": size.microbatch * size.microbatches,
            },
        }
    )
    return resolve(config, TP, VOCABULARY)


def exchanges(size: Size, side: Side, mesh: ParallelMesh) -> Callable[[int], None]:
    """Return a function that runs the tensor-parallel collectives of a step, one after the
    other."""
    each: list[tuple[str, torch.Tensor]] = []
    for exchange in step_traffic(Units(*laid_out(size, side)), 0):
        if exchange.axis == "tp":
            values = exchange.bytes // exchange.count // torch.float32.itemsize
            values = -(-values // TP) * TP
            values //= TP if exchange.collective == "all_gather" else 1
            each += [(exchange.collective, torch.zeros(values))] * exchange.count

    def exchange_all(_: int) -> None:
        for collective, values in each:
            ROUTINES[collective](values, mesh.tp)

    return exchange_all


def times(world: World, size: Size, rounds: int) -> list[list[float]]:
    """Return seconds of each round, by side, and of the exchanges of SPLIT and PLAIN."""
    mesh = world.mesh(Grid(tp=TP))
    steps = [TrainStep(*laid_out(size, side), mesh) for side in SIDES]
    samples = size.microbatch * size.microbatches
    batch = Batch(VOCABULARY, samples, size.microbatch, size.sequence)
    alone = (exchanges(size, side, mesh) for side in (SPLIT, PLAIN))
    return in_turns(steps, batch, rounds, *alone)


def measure(size: Size, rounds: int) -> Iterator[Result]:
    by_side = zip(*run_world(TP, times, size, rounds, timeout_s=3600), strict=True)
    slowest = [list(map(max, zip(*ranks, strict=True))) for ranks in by_side]
    *of_sides, with_split, without = slowest
    of = dict(zip(SIDES, of_sides, strict=True))

    def ratio(one: Side, other: Side) -> float:
        return statistics.median(a / b for a, b in zip(of[one], of[other], strict=True))

    step, more, less = map(statistics.median, (of[PLAIN], with_split, without))
    what = f"hidden {size.hidden}, {size.sequence * size.microbatch} tokens"
    print(
        f"{what}: a step of plain tp {TP} {step * 1e3:.1f} ms; exchanges alone "
        f"{less * 1e3:.2f} ms, with sequence parallelism {more * 1e3:.2f} ms, "
        f"which would make a step {1 + (more - less) / step:.2f} times as long"
    )
    yield Result(f"{what}: sequence parallelism", ratio(SPLIT, PLAIN), 1.15, "x", f"plain tp {TP}")
    for name, side in (("sequence parallelism", SPLIT), (f"tp {TP}", PLAIN)):
        waiting = ratio(side, side._replace(overlap=False))
        yield Result(f"{what}: {name}, collectives hidden", waiting, 1.0, "x", "waited for")


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=40, help="timed steps per side (40)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    sizes, rounds = (QUICK, 2) if given.quick else (SIZES, given.rounds)
    results = [result for size in sizes for result in measure(size, rounds)]
    report("Tensor parallelism", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
