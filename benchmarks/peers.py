"""megapipe compared with its peers, on the CPU: ``python benchmarks/peers.py``.

Each row trains one model twice in the same processes, once by megapipe and once by a peer. Weights,
batches, clipping and AdamW in fp32 are the same. A row counts only if the losses of the first steps
agree to 2e-6, and if the load of the machine was at most 2 before it. Otherwise it says that it is
void, and the exit code is 1. Then the two run a step by turns. The value is the peer's time over
ours, as the median over the rounds. It is given for the wall clock, until the slowest process is
done, and for the processors, all processes together. The last rows have a model so small that the
cost of a step besides its arithmetic decides.

The peer transformers runs GPT-2 in one process. torch's pipelining, DistributedDataParallel with
ZeroRedundancyOptimizer, and FSDP2 run a plain GPT-2 (:mod:`plain_gpt`). torch's tensor parallelism
splits transformers' Llama, whose projections are apart. megatron-core (:mod:`megatron_peer`) and
DeepSpeed's pipeline (:mod:`deepspeed_peer`) run where they are installed.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import Result, parser, quiet, report
from deepspeed_peer import deepspeed_side
from megatron_peer import megatron_side
from peer_row import Part, Row, Side, adamw, clip, plain_model, token_loss
from step import (
    CHECKED_STEPS,
    CLIP,
    Size,
    hugging_face_side,
    initial_weights,
)
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from zero import Peer as Replicated
from zero import own_batches

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.testing import World, run_world

TOLERANCE = 2e-6
SMALL_GOAL = 1.0
VOID = "void, first losses apart by"
"""Words in the claim of a row that does not count."""
MOST_LOAD = 2.0
BUSY = "void, load of the machine"
"""Words in the claim of a row that was not measured, as other programs ran."""


class Lap(NamedTuple):
    """Seconds of one step on one rank."""

    wall: float
    processor: float


def megapipe_side(row: Row, mesh: ParallelMesh) -> Side:
    config, layout = row.config()
    train = TrainStep(config, layout, mesh)
    batches = row.batches()
    mask = torch.ones(row.samples, row.size.sequence, dtype=torch.bool)

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        batch = batches[indices[0] // row.samples % len(batches)]
        chosen = batch[[i % row.samples for i in indices]]
        return chosen[:, :-1], chosen[:, 1:], mask[: len(indices)]

    def step(i: int) -> float:
        (result,) = train.train(i, rows)
        return result.loss

    return step


def transformers_side(row: Row, mesh: ParallelMesh) -> Side:
    assert row.microbatches == 1
    return hugging_face_side(row.size)


def pipelining_side(row: Row, mesh: ParallelMesh) -> Side:
    """Make torch.distributed.pipelining: 1F1B, or interleaved 1F1B if megapipe has chunks."""
    model = plain_model(row, tied=False)
    chunks = row.chunks
    count = chunks * row.pp
    share = row.size.layers // count
    stages: list[Any] = []
    for index in range(mesh.rank, count, row.pp):
        layers = range(index * share, (index + 1) * share)
        part = Part(model, layers, first=index == 0, last=index + 1 == count)
        stages.append(PipelineStage(part, index, count, torch.device("cpu")))

    schedule: Any
    if chunks == 1:
        schedule = Schedule1F1B(stages[0], row.microbatches, loss_fn=token_loss)
    else:
        schedule = ScheduleInterleaved1F1B(stages, row.microbatches, loss_fn=token_loss)
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = adamw(parameters)
    batches = row.batches()

    def step(i: int) -> float:
        batch = batches[i % len(batches)]
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        losses: list[Tensor] = []
        schedule.step(
            *((tokens,) if mesh.rank == 0 else ()),
            target=labels if mesh.rank == row.pp - 1 else None,
            losses=losses,
            return_outputs=False,
        )
        clip([], [p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return statistics.mean(float(loss.detach()) for loss in losses) if losses else math.nan

    return step


def replicated_side(row: Row, mesh: ParallelMesh) -> Side:
    peer = Replicated(row.size, mesh.rank)
    return lambda i: float(peer.step(i))


def fsdp_side(row: Row, mesh: ParallelMesh) -> Side:
    """Make FSDP2: each block, and the rest, gathered and reduced separately."""
    model = plain_model(row, tied=True)
    replicas = init_device_mesh("cpu", (row.dp,))
    for block in model.h:
        fully_shard(block, mesh=replicas)
    fully_shard(model, mesh=replicas)
    parameters = list(model.parameters())
    optimizer = adamw(parameters)
    batches = own_batches(row.size, mesh.rank)

    def step(i: int) -> float:
        batch = batches[i % len(batches)]
        loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def tensor_parallel_side(row: Row, mesh: ParallelMesh) -> Side:
    """Make torch's tensor parallelism of transformers' Llama; the embedding and the head are
    whole."""
    from transformers import LlamaForCausalLM

    from megapipe.model.gpt.hf.config import config_to_hf

    config, _ = row.config()
    model = LlamaForCausalLM(config_to_hf(config.model, attn_implementation="sdpa")).train()
    model.load_state_dict(initial_weights(row.size))
    ranks = init_device_mesh("cpu", (row.tp,))
    plan: dict[str, Any] = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[name] = ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, ranks, plan)
    parameters = list(model.parameters())
    # the fused kernel takes one kind of tensor at a time
    split = [p for p in parameters if isinstance(p.data, DTensor)]
    whole = [p for p in parameters if not isinstance(p.data, DTensor)]
    optimizers = [adamw(split), adamw(whole)]
    batches = row.batches()

    def step(i: int) -> float:
        batch = batches[i % len(batches)]
        tokens, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        loss = model(tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        loss.backward()
        clip(
            [p.grad for p in whole if p.grad is not None],
            [p.grad.to_local() for p in split if isinstance(p.grad, DTensor)],
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


PEERS: dict[str, Callable[[Row, ParallelMesh], Side]] = {
    "transformers": transformers_side,
    "torch pipelining": pipelining_side,
    "DDP + ZeroRedundancyOptimizer": replicated_side,
    "FSDP2": fsdp_side,
    "torch tensor parallelism": tensor_parallel_side,
    "megatron-core": megatron_side,
    "deepspeed": deepspeed_side,
}
OPTIONAL = ("megatron-core", "deepspeed")
"""Peers that this project does not install, by the names of their packages."""


class Measured(NamedTuple):
    """Measurements of one rank."""

    apart: float
    """Largest relative difference of the first losses."""
    ours: list[Lap]
    theirs: list[Lap]


def measure(world: World, row: Row, rounds: int) -> Measured:
    mesh = world.mesh(Grid(pp=row.pp, dp=row.dp, tp=row.tp))
    sides = (megapipe_side(row, mesh), PEERS[row.peer](row, mesh))
    apart = 0.0
    for i in range(CHECKED_STEPS):
        apart = max(apart, difference(sides[0](i), known_mean(sides[1](i))))
    laps: tuple[list[Lap], list[Lap]] = ([], [])
    for i in range(CHECKED_STEPS, CHECKED_STEPS + rounds):
        for side in (0, 1) if i % 2 else (1, 0):
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            sides[side](i)
            laps[side].append(Lap(time.perf_counter() - wall, time.process_time() - processor))
    return Measured(apart, *laps)


def difference(ours: float, theirs: float) -> float:
    """Return the relative difference; infinite if one is not a number, which no maximum would
    show."""
    found = abs(ours - theirs) / ours
    return math.inf if math.isnan(found) else found


def known_mean(loss: float) -> float:
    """Return the mean over the ranks that know a loss."""
    known = torch.tensor([0.0, 0.0] if math.isnan(loss) else [loss, 1.0], dtype=torch.float64)
    dist.all_reduce(known)
    return float(known[0] / known[1])


def ratios(ranks: Sequence[Measured]) -> Lap:
    """Return the peer's time over ours, medians of the rounds."""

    def laps(side: str) -> Iterator[Lap]:
        for round_ in zip(*(getattr(rank, side) for rank in ranks), strict=True):
            yield Lap(max(lap.wall for lap in round_), sum(lap.processor for lap in round_))

    pairs = list(zip(laps("ours"), laps("theirs"), strict=True))
    return Lap(
        statistics.median(theirs.wall / ours.wall for ours, theirs in pairs),
        statistics.median(theirs.processor / ours.processor for ours, theirs in pairs),
    )


def installed(peer: str) -> bool:
    try:
        version(peer)
    except PackageNotFoundError:
        return False
    return True


def claims(row: Row, rounds: int, most_load: float) -> Iterator[Result]:
    load = 0.0 if math.isinf(most_load) else quiet(most_load)
    print(f"{row.name}, {row.peer}: load {load:.2f}", flush=True)
    name = f"{row.name}, {row.size.family}, hidden {row.size.hidden}"
    if load > most_load:
        yield Result(f"{name}, {row.peer}: {BUSY}", load, most_load, "processes", row.peer)
        return
    ranks = run_world(row.world, measure, row, rounds, timeout_s=600.0)
    apart = max(rank.apart for rank in ranks)
    if apart > TOLERANCE:
        yield Result(f"{name}, {row.peer}: {VOID}", apart, TOLERANCE, "relative", row.peer)
        return
    ours = statistics.median(max(laps).wall for laps in zip(*(r.ours for r in ranks), strict=True))
    for what, ratio in zip(("wall", "processors"), ratios(ranks), strict=True):
        peer = f"ours {1e3 * ours:.1f} ms"
        yield Result(f"{name}, {row.peer}: {what}", ratio, row.goal, "x", peer, at_least=True)


def rows(large: Size, small: Size) -> list[Row]:
    """Return every layout with its peers; then, with a small model, those whose cost besides
    arithmetic it shows."""
    one = Row("1 process", "transformers", large)
    pipe = Row("pp 2", "torch pipelining", large, pp=2, microbatches=4)
    looped = {"chunks": 2, "schedule": "interleaved_1f1b"}
    looped_pipe = replace(pipe, name="pp 2, 2 chunks", pipeline=looped)
    data = Row("dp 2", "DDP + ZeroRedundancyOptimizer", large, dp=2)
    llama = replace(large, family="llama")
    tensor = Row("tp 2", "torch tensor parallelism", llama, tp=2)
    listed = [
        one,
        replace(one, size=llama),
        pipe,
        looped_pipe,
        data,
        replace(data, peer="FSDP2"),
        tensor,
    ]
    for row in (one, pipe, looped_pipe, data, tensor):
        listed.append(replace(row, peer="megatron-core", size=large))
    listed.append(replace(pipe, peer="deepspeed"))
    listed += [replace(row, size=small, goal=SMALL_GOAL) for row in (one, pipe, data)]
    return listed


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=15, help="timed steps per side (15)")
    options.add_argument(
        "--only", metavar="TEXT", default="", help="rows whose name has this in it"
    )
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    large = Size("gpt2", batch=2)
    small = Size("gpt2", hidden=64, heads=2, vocab=512, sequence=64, batch=1)
    rounds = given.rounds
    if given.quick:
        large = Size("gpt2", layers=4, hidden=16, heads=2, vocab=32, sequence=8, batch=1)
        small, rounds = replace(large, hidden=8), 1
    chosen = [row for row in rows(large, small) if given.only in f"{row.name}, {row.peer}"]
    if not chosen:
        options.error(f"no row has {given.only!r} in its name")
    absent = [
        peer for peer in OPTIONAL if any(row.peer == peer for row in chosen) and not installed(peer)
    ]
    for peer in absent:
        print(f"not installed: {peer}")
    present = (row for row in chosen if row.peer not in absent)
    most_load = math.inf if given.quick else MOST_LOAD
    results = [result for row in present for result in claims(row, rounds, most_load)]
    report("The time of peers over megapipe's", results, given.json)
    return int(any(result.claim.endswith((VOID, BUSY)) for result in results))


if __name__ == "__main__":
    sys.exit(main())
