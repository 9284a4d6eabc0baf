"""Positions split over two processes on gloo: ``python benchmarks/context_parallel.py``.

Attention by itself runs forward and backward, in every way that two ranks have. It is compared with
one process with all positions, and with a ring as it is first written: blocking messages, one
matrix of scores per tile, all of it left to autograd. It is also compared with two processes that
share the work and send nothing. If the package ring-attention-pytorch is installed, its forward is
compared too; in version 0.5.20 its gradients of keys and values over two ranks of gloo are not
those of one process, so its backward is left out. Then come whole steps of a small Llama: positions
split over two ranks against samples split over two, with as many tokens; peak activations against
those of one rank; and bytes sent against the plan. Results are compared before anything is timed.
Sides take turns within one run, one thread per process; a ratio is the median over the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from common import Result, parser, report
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megapipe import TrainStep
from megapipe.assembly.context import make_context
from megapipe.config.config import Config
from megapipe.distributed.axis import Axis
from megapipe.distributed.exchange import PeerMessage, PendingExchange, start_exchange
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.layers import ring_attention
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout.layout import Layout
from megapipe.layout.resolve import resolve
from megapipe.ops.live_storages import LiveStorages
from megapipe.ops.scores import ScoreModifiers
from megapipe.ops.tile_attention import CpuFlash
from megapipe.plan.traffic import step_traffic
from megapipe.plan.units import Units
from megapipe.testing import World, run_world

CP, VOCABULARY, SAME = 2, 1024, 1e-4
WAYS: dict[str, dict[str, Any]] = {
    "ring, zigzag": {},
    "Ulysses": {"ulysses": CP},
    "all_gather": {"algorithm": "all_gather"},
    "ring, contiguous": {"position_split": "contiguous"},
}
ALONE, PLAIN, APART = "one process", "a plain ring", "half of the heads each, nothing sent"
PACKAGE, FORWARD = "ring-attention-pytorch", "ring, zigzag, forward"
"""The package, and the name of its row, which has no backward."""


class Size(NamedTuple):
    length: int
    heads: int
    head_dim: int


class Model(NamedTuple):
    layers: int
    hidden: int
    heads: int
    length: int


SIZE, QUICK_SIZE = Size(8192, 8, 64), Size(64, 2, 8)
MODEL, QUICK_MODEL = Model(6, 256, 8, 4096), Model(1, 16, 2, 32)


def layout_of(model: Model, *, dp: int = 1, cp: int = 1, **context: Any) -> tuple[Config, Layout]:
    """Return configuration and layout of a Llama that sees two sequences a step."""
    config = Config.model_validate(
        {
            "model": {
                "layers": model.layers,
                "hidden": model.hidden,
                "heads": model.heads,
                "kv_heads": model.heads // 2,
                "vocab_size": VOCABULARY,
                "norm": "rmsnorm",
                "positions": "rotary",
                "activation": "swiglu",
                "bias": False,
            },
            "parallel": {"dp": dp, "cp": cp},
            "context": context,
            "train": {"sequence_length": model.length, "microbatch": 1, "global_batch": 2},
        }
    )
    return resolve(config, dp * cp, VOCABULARY)


class _Shift(torch.autograd.Function):
    """Sends a tensor to the next rank and receives that of the one before, one after the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return shifted(x, rank)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return shifted(grad, ctx.rank), None


def shifted(x: Tensor, rank: int) -> Tensor:
    """Exchange a tensor between two ranks."""
    received = x.new_empty(x.shape)
    calls = [lambda: dist.send(x.contiguous(), 1 - rank), lambda: dist.recv(received, 1 - rank)]
    for call in calls if rank == 0 else reversed(calls):
        call()
    return received


def plain_ring(q: Tensor, k: Tensor, v: Tensor, rank: int) -> Tensor:
    """Attend over contiguous ranges of positions, [1, heads, s, d] each."""
    s = q.shape[2]
    total: Tensor | None = None
    lse = out = q
    for step in range(CP):
        if step:
            k, v = (_Shift.apply(x, rank) for x in (k, v))
        first = (rank - step) % CP * s
        before = torch.arange(s)[:, None] + rank * s - torch.arange(s) - first
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(before < 0, float("-inf"))
        if total is None:
            total = lse = scores.logsumexp(-1, keepdim=True)
            out = scores.softmax(-1) @ v
            continue
        block = scores.logsumexp(-1, keepdim=True)
        lse = torch.logaddexp(total, block)
        out = out * (total - lse).exp() + (scores - lse).exp() @ v
        total = lse
    return out


def attention(world: World, size: Size, rounds: int) -> dict[str, list[float]]:
    """Return seconds of each round by side; 0 on a rank that has nothing to do."""
    generator = torch.Generator().manual_seed(0)
    shape = (size.length, 1, size.heads, size.head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator) for _ in range(4))
    rank = world.rank

    def attend(heads: slice) -> list[Tensor]:
        leaves = [x[:, :, heads].clone().requires_grad_() for x in (q, k, v)]
        q_, k_, v_ = (x.permute(1, 2, 0, 3) for x in leaves)
        out = scaled_dot_product_attention(q_, k_, v_, is_causal=True).permute(2, 0, 1, 3)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad[:, :, heads])]

    def alone() -> list[Tensor]:
        return [] if rank else attend(slice(None))

    def apart() -> list[Tensor]:
        each = size.heads // CP
        return attend(slice(rank * each, (rank + 1) * each))

    def own_of(context: Any, held: Any) -> Callable[[], list[Tensor]]:
        rows = list(held.own)
        mine = [x[rows] for x in (q, k, v)]
        own_grad, mb = grad[rows], MicroBatch(0, 0, 0, local_positions=held)

        def run() -> list[Tensor]:
            leaves = [x.clone().requires_grad_() for x in mine]
            out = context.attend(*leaves, mb, ScoreModifiers(), 0)
            return [out.detach(), *torch.autograd.grad(out, leaves, own_grad)]

        return run

    def forward_of(context: Any, held: Any) -> Callable[[], list[Tensor]]:
        mine, mb = [x[list(held.own)] for x in (q, k, v)], MicroBatch(0, 0, 0, local_positions=held)
        return lambda: [context.attend(*mine, mb, ScoreModifiers(), 0)]

    half = slice(rank * size.length // CP, (rank + 1) * size.length // CP)

    def plain() -> list[Tensor]:
        leaves = [x[half].clone().requires_grad_() for x in (q, k, v)]
        q_, k_, v_ = (x.permute(1, 2, 0, 3) for x in leaves)
        out = plain_ring(q_, k_, v_, rank).permute(2, 0, 1, 3)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad[half])]

    def package() -> list[Tensor]:
        attend = import_module("ring_attention_pytorch").ring_flash_attn
        rows = (x[half].transpose(0, 1) for x in (q, k, v))  # [1, s, heads, d]
        out = attend(*rows, causal=True, ring_reduce_col=True, ring_size=CP)
        return [out.transpose(0, 1)]

    sides: dict[str, Callable[[], list[Tensor]]] = {ALONE: alone, PLAIN: plain, APART: apart}
    rows_of: dict[str, Any] = {PLAIN: half}
    mesh = world.mesh(Grid(cp=CP))
    for name, context in WAYS.items():
        model = Model(1, size.heads * size.head_dim, size.heads, size.length)
        _, layout = layout_of(model, cp=CP, **context)
        made = make_context(layout, mesh, CpuFlash())
        held = layout.split.local([size.length], rank)
        sides[name], rows_of[name] = own_of(made, held), list(held.own)
    if find_spec("ring_attention_pytorch") is not None:
        sides[PACKAGE], rows_of[PACKAGE] = package, half
        _, layout = layout_of(model, cp=CP)
        held = layout.split.local([size.length], rank)
        made = make_context(layout, mesh, CpuFlash())
        sides[FORWARD], rows_of[FORWARD] = forward_of(made, held), list(held.own)
    whole = [x.contiguous() if rank == 0 else torch.empty_like(q) for x in alone() or [q] * 4]
    for x in whole:
        dist.broadcast(x, 0)
    for name, rows in rows_of.items():
        wanted = whole[:1] if name in (PACKAGE, FORWARD) else whole
        for found, right in zip(sides[name](), wanted, strict=True):
            error = (found - right[rows]).norm() / right[rows].norm()
            assert error < SAME, f"{name}: {error:.1e} off"
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for i in range(rounds):
        for turn in range(len(names)):
            name = names[(i + turn) % len(names)]
            dist.barrier()
            start = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def steps(world: World, model: Model, rounds: int) -> tuple[dict[str, list[float]], list[int], int]:
    """Return seconds of steps by side, peak bytes of cp 2 and of one rank's step, and bytes that
    the plan does not have."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (2, model.length + 1), generator=generator)
    mask = torch.ones(1, model.length, dtype=torch.bool)

    def rows(indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        batch = tokens[[index % 2 for index in indices]]
        return batch[:, :-1], batch[:, 1:], mask

    mesh, cp = world.mesh(Grid(cp=CP)), layout_of(model, cp=CP)
    beside = ParallelMesh(Grid(dp=CP), device=mesh.device, timeout_s=600)
    made = {"cp 2": TrainStep(*cp, mesh), "dp 2": TrainStep(*layout_of(model, dp=CP), beside)}
    number = dict.fromkeys(made, 0)

    def train(name: str) -> float:
        (result,) = made[name].train(number[name], rows)
        number[name] += 1
        return result.loss

    sent = 0

    def spy(
        sends: Sequence[PeerMessage], receives: Sequence[PeerMessage], axis: Axis
    ) -> PendingExchange:
        nonlocal sent
        sent += sum(letter.tensor.nbytes for letter in sends)
        return start_exchange(sends, receives, axis)

    with mock.patch.object(ring_attention, "start_exchange", spy):
        losses = [train(name) for name in made]
    assert abs(losses[0] / losses[1] - 1) < SAME, f"losses {losses}"
    planned = sum(
        e.bytes for e in step_traffic(Units(*cp), 0) if (e.axis, e.collective) == ("cp", "send")
    )
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for i in range(rounds):
        for name in list(made) if i % 2 else reversed(made):
            dist.barrier()
            start = time.perf_counter()
            train(name)
            seconds[name].append(time.perf_counter() - start)
    peaks = []
    for name in ("cp 2", "dp 2"):  # a rank of dp 2 has a whole sequence, as one rank alone has
        known = [p.data for m in made[name].modules.values() for p in m.parameters()]
        known += [shard.bucket.weights for shard in made[name].optimizer.shards]
        with LiveStorages(known) as live:
            first = made[name].data.fetch(number[name], rows)[0]
            stage = made[name].stages[0]
            key = min(first)
            stage.begin(train=True)
            stage.forward(key, None, first[key])
            stage.backward(key, None)
            peaks.append(live.peak)
    return seconds, peaks, abs(sent - planned)


def measure(quick: bool, rounds: int) -> list[Result]:
    size, model = (QUICK_SIZE, QUICK_MODEL) if quick else (SIZE, MODEL)
    ranks = run_world(CP, attention, size, rounds, timeout_s=1800)
    of = {name: list(map(max, *(rank[name] for rank in ranks))) for name in ranks[0]}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(of[one], of[other], strict=True))

    print(f"one process: {statistics.median(of[ALONE]):.3f} s of {size}")
    at_least = partial(Result, unit="x", at_least=True)
    what = f"attention, {size.length} positions"
    peer = f"{ALONE}; {APART}: {ratio(ALONE, APART):.2f}"
    results = [
        at_least(f"{what}: one process / {name}", ratio(ALONE, name), target, peer=peer)
        for name, target in (("ring, zigzag", 1.75), ("Ulysses", 1.75), ("all_gather", 1.65))
    ]
    uneven = ratio("ring, contiguous", "ring, zigzag")
    results.append(at_least(f"{what}: contiguous / zigzag", uneven, 1.35, peer="zigzag"))
    ours = ratio("ring, zigzag", PLAIN)
    results.append(Result(f"{what}: ring / as first written", ours, 0.6, "x", PLAIN))
    if PACKAGE in of:
        ours = ratio(FORWARD, PACKAGE)
        results.append(Result(f"{what}: forward, ring / the package's", ours, 0.8, "x", PACKAGE))
    else:
        print(f"{PACKAGE} is not installed: it is left out", file=sys.stderr)
    worlds = run_world(CP, steps, model, rounds, timeout_s=1800)
    slowest = {name: list(map(max, *(w[0][name] for w in worlds))) for name in worlds[0][0]}
    both = statistics.median(a / b for a, b in zip(slowest["cp 2"], slowest["dp 2"], strict=True))
    of_step = f"a step of {model.length} positions"
    print(f"dp 2: {statistics.median(slowest['dp 2']):.2f} s a step of {model}")
    results.append(Result(f"{of_step}: cp 2 / dp 2", both, 1.10, "x", "dp 2"))
    share = max(w[1][0] for w in worlds) / max(w[1][1] for w in worlds)
    results.append(Result(f"{of_step}: peak activations of cp 2", share, 0.55, "x", "cp 1"))
    unlike = max(w[2] for w in worlds)
    results.append(Result(f"{of_step}: bytes unlike the plan", unlike, 0, "B", "formula"))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=7, help="timed turns of each side (7)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    results = measure(given.quick, 2 if given.quick else given.rounds)
    report("Context parallelism", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
