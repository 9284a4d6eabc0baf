"""Bytes and time of sharded data parallelism: ``python benchmarks/zero.py``.

Bytes. A process of a job of 2, 4 and 8 replicas runs a step on torch's fake process group, with
each ZeRO stage. The bytes that it hands to the collectives and the memory that it keeps are
compared with the formulas of Rajbhandari et al. (1910.02054), for two stages on one pipeline rank.

Time. Two processes on gloo. The optimizer's part of a step (sum gradients, global norm, clip,
AdamW, gather weights) is timed by turns with a bare loop over arrays of the same sizes, which must
give the same weights. The loop uses torch's calls, whose reduce-scatter for gloo is an all-reduce,
or our own messages, which send each rank its shard (:mod:`megapipe.distributed.gloo`). Whole steps
are timed by turns with DistributedDataParallel and ZeroRedundancyOptimizer around a plain GPT-2
(:mod:`plain_gpt`) with the same weights, batches and losses. The fastest rounds of both are
compared.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import Result, parser, report
from fake_world import Amount, Seen, Watch, fake_world
from plain_gpt import PlainGPT
from rich.console import Console
from rich.table import Table
from step import (
    BETAS,
    CHECKED_STEPS,
    CLIP,
    DECAY,
    LR,
    TOLERANCE,
    Size,
    decayed,
    initial_weights,
)
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adam import adam

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.collectives import start_all_gather, start_reduce_scatter
from megapipe.distributed.mesh import Axis, Grid
from megapipe.layout.buckets import process_buckets
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.optim.buffers import Bucket
from megapipe.testing import World, run_world
from megapipe.train.feed import LocalTokens
from megapipe.train.step_stats import RankRequests, StepStats
from megapipe.util.dtypes import DTYPE_BYTES

# names before torch 2.13
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(
    dist, "reduce_scatter_single", dist.reduce_scatter_tensor
)
MIB = 2**20
CHUNKS, VOCABULARY = 2, 128
SAME = 1e-6
"""Most by which weights, of 1 at most, may differ from the bare loop's after a few steps: that adds
up the norm in fp32."""


class Bytes(NamedTuple):
    """Bytes of one process."""

    wire: Fraction
    """Bytes sent in a step by ring algorithms."""
    weights: int
    """Bytes of weights kept between steps; the following fields are kept, too."""
    gradients: int
    states: int
    """Bytes of moments, and of master weights of a bf16 model."""


def sharded(dp: int, zero: int, dtype: str) -> tuple[Config, Layout]:
    """Return two stages on one pipeline rank, breadth-first."""
    config = Config.model_validate(
        {
            "model": {
                "layers": 4,
                "hidden": 30,
                "heads": 3,
                "tied_embeddings": False,
                "dtype": dtype,
            },
            "parallel": {"dp": dp},
            "pipeline": {"schedule": "breadth_first", "chunks": CHUNKS},
            "optimizer": {"zero": zero, **({"weight_prefetch": 0} if zero == 3 else {})},
            "train": {"sequence_length": 8, "microbatch": 1, "global_batch": 4 * dp},
        }
    )
    return resolve(config, dp, VOCABULARY)


def formula(config: Config, layout: Layout) -> Bytes:
    """Return the bytes with a reduction per stage, and for ZeRO-3 two gathers per stage except the
    one that the last forward and the first backward share."""
    zero, d = config.optimizer.zero, layout.dp
    width = DTYPE_BYTES[config.model.dtype]
    wire, weights, gradients, states = Fraction(0), 0, 0, 0
    for bucket in process_buckets(config, layout, 0):
        n = bucket.numel
        ring = Fraction(d - 1, d) * n
        gathers = {0: 0, 1: 1, 2: 1, 3: 1 if bucket.stage + 1 == layout.stages else 2}[zero]
        wire += ring * (4 * (2 if zero == 0 else 1) + width * gathers)
        weights += width * n // (d if zero == 3 else 1)
        gradients += 4 * (bucket.norm_numel if zero >= 2 else n)
        states += (8 if width == 4 else 12) * n // (1 if zero == 0 else d)
    # tokens; squared norms; loss, tokens, three requests, whether states are finite, memory
    scalars = 1 + (layout.stages + 1) + 7
    return Bytes(wire + (d - 1) * 8 * scalars, weights, gradients, states)


def observed(config: Config, layout: Layout) -> Bytes:
    with fake_world(Grid(dp=layout.dp), layout.dp - 1) as mesh:
        step = TrainStep(config, layout, mesh)
        watch = Watch()
        step.train(0, zeros)
        with watch.counting():
            step.train(1, zeros)
        step.optimizer.await_all_weights()
        wire = sum(
            (on_the_wire(*item, layout.dp) for item in watch.totals(mesh).items()), Fraction()
        )
    shards = step.optimizer.shards
    return Bytes(
        wire,
        weights=allocated([t for s in shards for t in (s.weights, s.bucket.weights)]),
        gradients=allocated([g for s in shards for g in main_grads(s.bucket)]),
        states=sum(s.store.nbytes().device for s in shards),
    )


def main_grads(bucket: Bucket) -> Iterator[Tensor]:
    """Yield the main gradients' buffers, and those of norms, which ZeRO-2 and 3 keep apart."""
    yield from bucket.grads
    yield from bucket.early_grads


def zeros(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.zeros(len(indices), 8, dtype=torch.int64)
    return tokens, tokens, torch.ones_like(tokens, dtype=torch.bool)


def on_the_wire(seen: Seen, amount: Amount, members: int) -> Fraction:
    """Return bytes sent: a ring sends all but one of `members` shards; an all-reduce does it
    twice."""
    assert seen.axis == "dp"
    ways = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}[seen.collective]
    return Fraction(ways * amount.bytes * (members - 1), members)


def allocated(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def byte_claims(replicas: Sequence[int]) -> Iterator[Result]:
    table = Table(title="MiB per process, bf16: sent in a step | kept", title_justify="left")
    for heading in ("ZeRO", *(f"dp {dp}" for dp in replicas)):
        table.add_column(heading, justify="right")
    for zero in range(4):
        cells, wrong, checked = [], 0, 0
        for dp in replicas:
            for dtype in ("fp32", "bf16"):
                config, layout = sharded(dp, zero, dtype)
                wanted, found = formula(config, layout), observed(config, layout)
                for what, a, b in zip(Bytes._fields, wanted, found, strict=True):
                    checked += 1
                    if a != b:
                        wrong += 1
                        print(f"ZeRO-{zero}, dp {dp}, {dtype}: {what}: {b}, the formula has {a}")
            kept = sum(found[1:])
            cells.append(f"{float(found.wire) / MIB:.2f} | {kept / MIB:.2f}")
        table.add_row(str(zero), *cells)
        dps = ", ".join(map(str, replicas))
        claim = f"ZeRO-{zero} at dp {dps}: bytes unlike the formula"
        yield Result(claim, wrong, 0, f"of {checked}", "formula")
    Console().print(table)


class Sides(NamedTuple):
    """Seconds per round of both sides."""

    ours: list[float]
    theirs: list[float]


def by_turns(ours: Callable[[int], object], theirs: Callable[[int], object], rounds: int) -> Sides:
    """Time both sides by turns. Two rounds warm up. All processes begin a round together."""
    times = Sides([], [])
    for i in range(rounds + 2):
        for side in (0, 1) if i % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            (ours, theirs)[side](i)
            times[side].append(time.perf_counter() - start)
    return Sides(times.ours[2:], times.theirs[2:])


def ratio(ranks: Sequence[Sides]) -> tuple[float, float]:
    """Return our fastest round over theirs, and theirs in seconds; a round lasts until all are
    done."""
    best = [min(map(max, zip(*(rank[side] for rank in ranks), strict=True))) for side in (0, 1)]
    return best[0] / best[1], best[1]


def replicated(size: Size, dp: int, *, tied: bool) -> tuple[Config, Layout]:
    settings = size.config()[0].model_dump()
    settings["model"]["tied_embeddings"] = tied
    settings["parallel"]["dp"] = dp
    settings["train"]["global_batch"] = dp * size.batch
    return resolve(Config.model_validate(settings), dp, size.vocab)


class BareLoop:
    """A loop of reduce-scatter, norm, clip, fused AdamW and all-gather of one flat array. It uses
    torch's collectives, or the messages over an `axis` that megapipe has for gloo."""

    def __init__(self, step: TrainStep, axis: Axis | None = None) -> None:
        self.axis = axis
        (shard,) = step.optimizer.shards
        self.weights = shard.bucket.weights.clone()
        self.grads = torch.empty_like(shard.bucket.grads[0])
        self.own = self.weights[shard.start : shard.stop]
        self.piece, self.mean, self.square = (torch.zeros_like(self.own) for _ in range(3))
        self.updates = 0
        ends = [each.stop for each in shard.bucket.segments() if each.decay]
        decayed = min(max(0, max(ends) - shard.start), len(self.own))
        self.parts = ((slice(0, decayed), DECAY), (slice(decayed, None), 0.0))

    def step(self, _: int) -> None:
        if self.axis is None:
            _reduce_scatter(self.piece, self.grads)
        else:
            self.piece, wait = start_reduce_scatter(self.grads, self.axis)
            wait()
        square = torch.linalg.vector_norm(self.piece).square()
        dist.all_reduce(square)
        norm = float(square.sqrt())
        if norm > CLIP:
            self.piece.mul_(CLIP / (norm + 1e-6))
        for part, decay in self.parts:
            adam(
                [self.own[part]],
                [self.piece[part]],
                [self.mean[part]],
                [self.square[part]],
                [],
                [torch.tensor(float(self.updates))],
                fused=True,
                decoupled_weight_decay=True,
                amsgrad=False,
                beta1=BETAS[0],
                beta2=BETAS[1],
                lr=LR,
                weight_decay=decay,
                eps=1e-8,
                maximize=False,
            )
        self.updates += 1
        if self.axis is None:
            _all_gather(self.weights, self.own)
        else:
            start_all_gather(self.weights, self.own, self.axis)()


def optimizer_part(world: World, size: Size, rounds: int, messages: bool) -> Sides:
    config, layout = replicated(size, world.size, tied=False)
    mesh = world.mesh(Grid(dp=world.size))
    train = TrainStep(config, layout, mesh)
    (shard,) = train.optimizer.shards
    bare = BareLoop(train, mesh.dp if messages else None)
    generator = torch.Generator().manual_seed(mesh.rank)
    shard.bucket.grads[0].normal_(generator=generator)
    shard.bucket.grads[0][shard.bucket.entries[-1].stop :] = 0  # padding
    bare.grads.copy_(shard.bucket.grads[0])

    def step(i: int) -> None:
        train.optimizer.reduce(0)
        own = train.totals.own(LocalTokens(1), RankRequests).pack()
        totals = StepStats.unpack(mesh.ordered_sum(own, "tp", "cp", "dp", "pp"))
        train.update.apply(i, totals, lambda: totals)
        train.optimizer.await_all_weights()

    for i in range(CHECKED_STEPS):
        step(i)
        bare.step(i)
    difference = (shard.bucket.weights - bare.weights).abs().max()
    assert difference <= SAME, f"weights differ by {difference}"
    return by_turns(step, bare.step, rounds)


class Peer:
    """A plain GPT-2 under DDP, with torch's sharded optimizer."""

    def __init__(self, size: Size, rank: int) -> None:
        model = PlainGPT(size.config()[0].model)
        model.load_gpt2(initial_weights(size))
        self.parameters = list(model.parameters())
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = ZeroRedundancyOptimizer(
            decayed(self.parameters),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=LR,
            betas=BETAS,
            fused=True,
        )
        self.batches = own_batches(size, rank)

    def step(self, i: int) -> Tensor:
        batch = self.batches[i % len(self.batches)]
        loss: Tensor = self.model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def own_batches(size: Size, rank: int) -> Tensor:
    """Return the batches [n, b, s + 1] of a replica."""
    tokens: Tensor = size.tokens()
    return (tokens + rank) % size.vocab


def whole_step(world: World, size: Size, rounds: int) -> Sides:
    config, layout = replicated(size, world.size, tied=True)
    mesh = world.mesh(Grid(dp=world.size))
    train = TrainStep(config, layout, mesh)
    peer = Peer(size, mesh.rank)
    batches = own_batches(size, mesh.rank)
    mask = torch.ones(size.batch, size.sequence, dtype=torch.bool)

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        batch = batches[indices[0] // (size.batch * world.size) % len(batches)]
        return batch[:, :-1], batch[:, 1:], mask

    for i in range(CHECKED_STEPS):
        (result,), loss = train.train(i, rows), peer.step(i)
        dist.all_reduce(loss)
        theirs = float(loss) / world.size
        assert abs(result.loss - theirs) <= TOLERANCE * theirs, (i, result.loss, theirs)
    return by_turns(
        lambda i: train.train(CHECKED_STEPS + i, rows),
        lambda i: peer.step(CHECKED_STEPS + i),
        rounds,
    )


def time_claims(size: Size, rounds: int) -> Iterator[Result]:
    for peer, messages in (("torch's calls", False), ("megapipe's messages", True)):
        sides = run_world(2, optimizer_part, size, 8 * rounds, messages, timeout_s=300.0)
        part, seconds = ratio(sides)
        yield Result(
            f"optimizer's part of a step, dp 2, over {peer}",
            part,
            1.03,
            "x",
            f"bare loop, {1e3 * seconds:.1f} ms",
        )
    step, seconds = ratio(run_world(2, whole_step, size, rounds, timeout_s=300.0))
    yield Result(
        "whole step, dp 2",
        step,
        1.0,
        "x",
        f"DDP + ZeroRedundancyOptimizer, {1e3 * seconds:.1f} ms",
    )


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=15, help="timed steps per side (15)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    size, rounds = Size("gpt2"), given.rounds
    replicas: Sequence[int] = (2, 4, 8)
    if given.quick:
        size = Size("gpt2", layers=1, hidden=16, heads=2, vocab=32, sequence=8)
        replicas, rounds = (2,), 1
    results = [*byte_claims(replicas), *time_claims(size, rounds)]
    report("Sharded data parallelism", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
