"""Worlds larger than this machine: ``python benchmarks/large_worlds.py``.

One process plays a rank of worlds of 8 to 16,384 on torch's fake process group, and trains a step:

- the calls and bytes of every collective equal the formulas of ``megapipe/plan/traffic.py``;
- the work of setting up a process does not grow with the world (the fake backend connects nothing,
  so this is our own share: groups, channels, stages, buffers, programs);
- models of 175 billion and of a trillion parameters are built and run a step on meta tensors, which
  have sizes and no values: the memory of a rank by formulas, and as its allocations add up.
"""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from common import Result, parser, report
from fake_world import (
    Allocations,
    Amount,
    Seen,
    Watch,
    even_choices,
    fake_world,
    without_values,
)
from rich.console import Console
from rich.table import Table

from megapipe import TrainStep
from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.plan.activation_memory import peak_activations
from megapipe.plan.measurements import BY_UNITS
from megapipe.plan.memory import model_memory
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units
from megapipe.train.feed import BatchReader

CONFIGS = Path(__file__).parents[1] / "configs"
WORLDS = {8: (2, 2), 64: (4, 4), 512: (8, 8), 4096: (8, 16), 16384: (8, 16)}
"""Processes of the job: tp and pp; dp is what is left."""
TOY = (
    "model.layers=32",
    "model.hidden=32",
    "model.heads=8",
    "model.vocab_size=1000",
    "train.sequence_length=32",
    "train.microbatch=2",
    "kernels.loss_chunk_tokens=48",
)
CASES = {
    "tp, ZeRO-0": ("optimizer.zero=0",),
    "tp, ZeRO-1": (),
    "sp, ZeRO-1": ("parallel.sequence_parallel=true",),
    "sp, ZeRO-1, bf16, untied, zb_v": (
        "parallel.sequence_parallel=true",
        "model.dtype=bf16",
        "model.tied_embeddings=false",
        "pipeline.schedule=zb_v",
        "kernels.loss_chunk_tokens=0",
    ),
    "ZeRO-1, reduced in bf16": ("optimizer.reduce_dtype=bf16",),
    "ZeRO-1, two replicas of each stage": ("pipeline.schedule=chimera",),
    "sp, ZeRO-2, interleaved": (
        "parallel.sequence_parallel=true",
        "optimizer.zero=2",
        "pipeline.schedule=interleaved_1f1b",
        "pipeline.chunks=2",
    ),
    "ZeRO-3, zb_v": ("optimizer.zero=3", "pipeline.schedule=zb_v"),
    "ZeRO-3, hybrid, interleaved": (
        "optimizer.zero=3",
        "optimizer.shard_group_size=2",
        "optimizer.weight_prefetch=0",
        "pipeline.schedule=interleaved_1f1b",
        "pipeline.chunks=2",
    ),
    "ZeRO-1, hybrid, reduced in bf16": (
        "optimizer.shard_group_size=2",
        "optimizer.reduce_dtype=bf16",
        "model.dtype=bf16",
    ),
    "sp, ZeRO-1, stages run again": (
        "parallel.sequence_parallel=true",
        "activations.policy=stage",
    ),
    "sp, ZeRO-1, blocks run again": (
        "parallel.sequence_parallel=true",
        "activations.policy=full",
        "pipeline.schedule=zb_h1",
    ),
    "sp, ZeRO-1, slices": (
        "pipeline.schedule=seq1f1b",
        "pipeline.sequence_slices=2",
        "model.positions=rotary",
        "parallel.sequence_parallel=true",
    ),
}


CONTEXT_WORLDS = {512: 4, 4096: 8, 16384: 16}
"""Processes of the job, and context-parallel ranks among those that tp and pp leave."""
CONTEXT_CASES = {
    "cp, ring": (),
    "cp, sp, ring, queries travel, ZeRO-2": (
        "parallel.sequence_parallel=true",
        "context.backward_circulates=queries",
        "optimizer.zero=2",
    ),
    "cp, ring, slices": ("pipeline.schedule=terapipe", "pipeline.sequence_slices=3"),
    "cp, all_gather, slices": (
        "context.algorithm=all_gather",
        "pipeline.schedule=seq1f1b",
        "pipeline.sequence_slices=2",
    ),
    "cp, heads over 2, ZeRO-3, bf16": (
        "context.ulysses=2",
        "optimizer.zero=3",
        "optimizer.shard_group_size=2",
        "model.dtype=bf16",
    ),
    "cp, double ring, bf16": (
        "context.algorithm=double_ring",
        "context.inner_ring_size=2",
        "model.dtype=bf16",
    ),
    "cp, helpers": ("context.algorithm=helpers", "context.position_split=contiguous"),
    "cp, teams, ZeRO-1, reduced in bf16": (
        "context.algorithm=teams",
        "context.team_size=2",
        "optimizer.reduce_dtype=bf16",
    ),
    "cp, attention kept, blocks run again": (
        "activations.policy=full",
        "activations.keep_attention=true",
    ),
}


EXPERTS = (
    "model.moe.num_experts=16",
    "model.moe.expert_ffn_hidden=32",
    "parallel.sequence_parallel=true",
)
EXPERT_WORLDS = (64, 512, 16384)
EXPERT_CASES = {
    "experts over dp and tp": ("parallel.ep=16",),
    "experts over tp, ZeRO-2, zb_v": (
        "parallel.ep=4",
        "optimizer.zero=2",
        "pipeline.schedule=zb_v",
    ),
    "experts and their width split, ZeRO-3, blocks run again": (
        "parallel.ep=8",
        "parallel.etp=2",
        "optimizer.zero=3",
        "activations.policy=full",
    ),
    "experts in every second layer, bf16, a shared one": (
        "parallel.ep=8",
        "model.moe.layer_freq=2",
        "model.moe.shared_ffn_hidden=32",
        "model.dtype=bf16",
        "pipeline.schedule=interleaved_1f1b",
        "pipeline.chunks=2",
    ),
}


TRILLION = (
    "model.layers=128",
    "model.hidden=25600",
    "model.heads=160",
    "model.vocab_size=51200",
    "model.dtype=bf16",
    "parallel.tp=8",
    "parallel.pp=64",
    "parallel.dp=6",
    "parallel.sequence_parallel=true",
    "train.sequence_length=2048",
    "train.microbatch=1",
)
"""The largest model of Narayanan et al. (2104.04473), on 3,072 processes."""
GIANTS = {
    "175B": (
        str(CONFIGS / "gpt3_175b.yaml"),
        "model.vocab_size=50257",
        "parallel.pp=16",
        "parallel.dp=8",
        "pipeline.chunks=2",
        "train.global_batch=256",
        "kernels.loss_chunk_tokens=4096",
    ),
    "1T": (*TRILLION, "train.global_batch=768", "kernels.loss_chunk_tokens=4096"),
}
"""Two micro-batches per pipeline rank: the activations are at their peak by then."""
SMALL_GIANT = (*TOY, "parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "train.global_batch=16")
TIMES, MEBIBYTES = 2.0, 8.0
"""Most that setting up in the largest world may take, against the smallest: times its time, and
additional memory."""
EXCESS = 1.03
"""Peak memory in multiples of the formulas' sum, which leaves out messages, loss and scratch."""
GIB = 2**30


class Cost(NamedTuple):
    """Cost of setting up one process."""

    groups: float
    """Seconds of the processor for the mesh and its process groups."""
    step: float
    """Seconds of the processor for channels, stages, buffers and programs."""
    mebibytes: float


class Giant(NamedTuple):
    """Memory of a rank of a large model."""

    lasting: int
    """Bytes allocated once it is set up."""
    after: int
    """Bytes allocated after a step."""
    peak: int
    """Bytes allocated in a step at most."""
    seen: dict[Seen, Amount]


def configure(*keys: str) -> tuple[Config, Layout]:
    config = parse([*keys, "plan.gpus=unset"]).config  # a preset's number is for its own layout
    return resolve(config, None, None, measure=BY_UNITS)


def toy(world: int, *keys: str, cp: int = 1) -> tuple[Config, Layout]:
    """Return a small model on `world` processes, two micro-batches per pipeline rank."""
    tp, pp = WORLDS[world]
    dp = world // (tp * pp * cp)
    if cp > 1:
        more = ("model.heads=32", "model.kv_heads=16", "model.hidden=64", "model.layers=16")
        keys = (*more, "train.sequence_length=768", f"parallel.cp={cp}", *keys)
    return configure(
        *TOY,
        f"parallel.tp={tp}",
        f"parallel.pp={pp}",
        f"parallel.dp={dp}",
        f"train.global_batch={2 * pp * 2 * dp}",
        *keys,
    )


def grid_of(layout: Layout) -> Grid:
    """Return the processes of a layout, fewer than its ranks if one runs the whole pipeline."""
    plane = layout.dp * layout.cp * layout.tp
    pp, experts = layout.world // plane, layout.ep_sizes
    return Grid(pp, layout.dp, layout.cp, layout.tp, *experts, layout.ranks_per_node)


def ranks_of(grid: Grid) -> list[int]:
    """Return processes on the first, second and last pipeline rank, at different dp and tp
    indices."""
    plane = grid.world // grid.pp
    return [0, 1 % grid.pp * plane + plane // 2, grid.world - 1]


def blank_rows(config: Config) -> BatchReader:
    length = config.train.sequence_length

    def rows(indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(len(indices), length, dtype=torch.int64)
        return tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)

    return rows


def expected(config: Config, layout: Layout, rank: int) -> dict[Seen, Amount]:
    """Return the collectives of process `rank` by the formulas."""
    result: dict[Seen, Amount] = {}
    at = grid_of(layout).coordinates_of(rank)
    for each in step_traffic(Units(config, layout), at.pp, at.cp):
        seen = Seen(each.axis, each.collective)
        calls, size = result.get(seen, Amount(0, 0))
        result[seen] = Amount(calls + each.count, size + each.bytes)
    return result


def observed(config: Config, layout: Layout, rank: int) -> dict[Seen, Amount]:
    """Return the collectives of process `rank` in a step."""
    with fake_world(grid_of(layout), rank) as mesh:
        step = TrainStep(config, layout, mesh)
        watch = Watch()
        with watch.counting(), even_choices():
            step.train(0, blank_rows(config))
        return watch.totals(mesh)


def unlike(seen: dict[Seen, Amount], formula: dict[Seen, Amount]) -> list[Seen]:
    """Return the collectives whose calls or bytes are not those of the formula."""
    names = sorted(seen.keys() | formula.keys())
    return [name for name in names if seen.get(name) != formula.get(name)]


def traffic_claim(name: str, keys: Sequence[str], worlds: Mapping[int, int]) -> Result:
    """Compare worlds with the formulas; `worlds` are sizes, each with its cp."""
    wrong = checked = 0
    for world, cp in worlds.items():
        config, layout = toy(world, *keys, cp=cp)
        for rank in ranks_of(grid_of(layout)):
            formula = expected(config, layout, rank)
            differing = unlike(observed(config, layout, rank), formula)
            for seen in differing:
                print(f"{name}, world {world}, rank {rank}: {seen} is unlike the formula")
            wrong, checked = wrong + len(differing), checked + len(formula)
    claim = f"{name}: collectives unlike the formula"
    return Result(claim, wrong, 0, f"of {checked}", "formula")


def set_up(dp: int) -> Cost:
    """Set up the last process of a job of tp 2, pp 2 and `dp`."""
    shape = ("parallel.tp=2", "parallel.pp=2", f"parallel.dp={dp}", "model.layers=4")
    config, layout = configure(*TOY, *shape, f"train.global_batch={8 * dp}")
    grid = grid_of(layout)
    before = _mebibytes()
    start = time.process_time()
    with fake_world(grid, grid.world - 1) as mesh:
        middle = time.process_time()
        step = TrainStep(config, layout, mesh)
        end = time.process_time()
        del step
    return Cost(middle - start, end - middle, _mebibytes() - before)


def _mebibytes() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cheapest(dp: int, rounds: int) -> Cost:
    """Return the least of each cost, over fresh processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megapipe.train.train_step"])
    with context.Pool(1, maxtasksperchild=1) as pool:
        costs = [pool.apply(set_up, (dp,)) for _ in range(rounds)]
    return Cost(*(min(column) for column in zip(*costs, strict=True)))


def set_up_claims(worlds: Sequence[int], rounds: int) -> list[Result]:
    table = Table(title="Setting up one process, tp 2, pp 2", title_justify="left")
    for heading in ("world", "groups, ms", "rest, ms", "memory, MiB"):
        table.add_column(heading, justify="right")
    costs = []
    for world in worlds:
        cost = cheapest(world // 4, rounds)
        costs.append(cost)
        times = (f"{1e3 * seconds:.1f}" for seconds in (cost.groups, cost.step))
        table.add_row(f"{world:,}", *times, f"{cost.mebibytes:.1f}")
    Console().print(table)
    first, last = costs[0], costs[-1]
    ratio = (last.groups + last.step) / (first.groups + first.step)
    more = last.mebibytes - first.mebibytes
    at, peer = f"set-up in a world of {worlds[-1]:,}", f"a world of {worlds[0]:,}"
    return [
        Result(f"{at}: time", ratio, TIMES, "x", peer),
        Result(f"{at}: more memory", more, MEBIBYTES, "MiB", peer),
    ]


def run_giant(config: Config, layout: Layout, rank: int) -> Giant:
    """Build process `rank` on meta tensors and run a step."""
    allocations, watch = Allocations(), Watch()
    with without_values(), fake_world(grid_of(layout), rank, "meta") as mesh:
        with allocations:
            step = TrainStep(config, layout, mesh)
            lasting = allocations.held()
            with watch.counting():
                step.train(0, blank_rows(config))
            after = allocations.held()
        return Giant(lasting, after, allocations.peak, watch.totals(mesh))


def giant_claims(name: str, keys: Sequence[str]) -> list[Result]:
    """Return claims on a process of the first and one of the last pipeline rank."""
    config, layout = configure(*keys)
    grid = grid_of(layout)
    table = Table(
        title=f"{name} on {grid.world:,} processes, GiB per process", title_justify="left"
    )
    headings = ("pp", "parameters", "gradients", "optimizer", "layers' activations", "peak")
    for heading in headings:
        table.add_column(heading, justify="right")
    wrong = checked = off = 0
    excess = []
    for rank in (0, grid.world - 1):
        index = grid.coordinates_of(rank).pp
        formula, giant = expected(config, layout, rank), run_giant(config, layout, rank)
        wrong, checked = wrong + len(unlike(giant.seen, formula)), checked + len(formula)
        memory = model_memory(config, layout, index)
        off = max(off, abs(giant.lasting - memory.persistent))
        activations = peak_activations(Units(config, layout), index).device
        sizes = (memory.parameters, memory.gradients, memory.optimizer, activations, giant.peak)
        excess.append(giant.peak / (memory.persistent + activations))
        table.add_row(str(index), *(f"{size / GIB:.2f}" for size in sizes))
    Console().print(table)
    return [
        Result(f"{name}: collectives unlike the formula", wrong, 0, f"of {checked}", "formula"),
        Result(f"{name}: model bytes off the formula", off, 0, "bytes", "formula"),
        Result(f"{name}: peak memory, first pipeline rank", excess[0], EXCESS, "x", "formula"),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=3, help="processes per set-up time (3)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    worlds, rounds, giants = list(WORLDS), given.rounds, GIANTS
    if given.quick:
        worlds, rounds, giants = worlds[:1], 1, {"toy": SMALL_GIANT}
    context_worlds = CONTEXT_WORLDS
    if given.quick:
        context_worlds = dict(list(context_worlds.items())[:1])
    results = [traffic_claim(name, keys, dict.fromkeys(worlds, 1)) for name, keys in CASES.items()]
    results += [traffic_claim(name, keys, context_worlds) for name, keys in CONTEXT_CASES.items()]
    expert_worlds = dict.fromkeys(EXPERT_WORLDS[: 1 if given.quick else None], 1)
    for name, keys in EXPERT_CASES.items():
        results.append(traffic_claim(name, (*EXPERTS, *keys), expert_worlds))
    results += set_up_claims(worlds if len(worlds) > 1 else [8, 64], rounds)
    for name, keys in giants.items():
        results += giant_claims(name, keys)
    report("Scale beyond the machine", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
