"""MoE layers on CPU cores: ``python benchmarks/moe.py``.

- A whole step of a small Mixtral (:mod:`step`), against transformers' by each of its ways to
  compute experts: the same weights, batches and losses, one thread.
- The products of experts in F, I and W, against dense products of as many FLOPs, if all experts get
  as many rows and if they get them by Zipf's law; those of W against a bare loop of addmm.
- The backward of a layer cut into I and W, against an uncut one.
- Two processes that train one model on other samples, with experts split over them, against both
  having all experts; and a tiny model over slowed links, against simulation (:mod:`slow_link`).

Compared sides run by turns. A ratio is that of the fastest; for I and W, and for two processes, it
is the median of the rounds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import slow_link
import torch
from common import Result, compare, parser, report, seconds
from interleaved_timing import Batch, in_turns
from step import OF_EXPERTS, Size, peak, times
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed.mesh import Axis, Grid, ParallelMesh
from megapipe.engine.stage import Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe.tasks import ExpertsTask
from megapipe.layers.moe.weights import ExpertGrads
from megapipe.layers.parameter import Sharding
from megapipe.layers.weight_grad import main_grad
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.ops.moe.grouped import loop_product
from megapipe.ops.weight_grad import torch_accumulate
from megapipe.optim.buffers import Bucket, owned_parameters
from megapipe.testing import World, run_world

EXPERTS, TOP_K = slow_link.EXPERTS, slow_link.TOP_K
COPYING, MOST_COPIED = "batched_mm", 4e9
"""The mode of transformers that copies matrices, and bytes beyond which it is skipped."""


def whole_step(size: Size, rounds: int) -> list[Result]:
    """Compare time and memory of a step with the fastest of transformers'."""
    peers = [name for name in OF_EXPERTS if name != COPYING or copied(size) < MOST_COPIED]
    if COPYING not in peers:
        print(f"{COPYING} is left out: it copies {copied(size) / 1e9:.0f} GB of matrices")
    fastest = times(size, ["megapipe", *peers], rounds)
    peer = min(peers, key=lambda name: fastest[name])
    memory = peak("megapipe", size) / peak(peer, size)
    for name, own in fastest.items():
        print(f"{name:12}{1e3 * own:8.1f} ms")
    of, name = "of one step, mixtral", f"Hugging Face Mixtral, {peer}"
    ratio = fastest["megapipe"] / fastest[peer]
    return [
        Result(f"time {of}", ratio, 0.95, "x", name),
        Result(f"peak memory {of}", memory, 0.9, "x", name),
    ]


def copied(size: Size) -> int:
    """Return the bytes of the matrices of experts that transformers copies for the rows of a step,
    one for each, and keeps to the backward."""
    config, _ = size.config()
    rows = size.batch * size.sequence * TOP_K
    return size.layers * rows * 3 * config.model.moe.expert_ffn_hidden * size.hidden * 4


class Shape(NamedTuple):
    """Shape of the two products of experts."""

    rows: int
    hidden: int
    ffn: int


def numbers(rows: int, experts: int, *, zipf: bool) -> list[int]:
    """Return the number of rows of each expert."""
    shares = [1 / (i + 1) if zipf else 1.0 for i in range(experts)]
    found = [int(rows * share / sum(shares)) for share in shares]
    found[0] += rows - sum(found)
    return found


def best(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the processor time of the fastest call of each."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds + 1):
        for name, function in functions.items():
            start = time.process_time()
            function()
            if i:
                seconds[name].append(time.process_time() - start)
    return {name: min(values) for name, values in seconds.items()}


def products(shape: Shape, rounds: int, *, zipf: bool) -> list[Result]:
    """Time F, I and W of both products, on rows in the order of their experts."""
    ends = list(accumulate(numbers(shape.rows, EXPERTS, zipf=zipf)))
    ways = {"up": (shape.hidden, 2 * shape.ffn), "down": (shape.ffn, shape.hidden)}
    ours: list[Callable[[], object]] = []
    dense: list[Callable[[], object]] = []
    of_weights: list[Callable[[], object]] = []
    bare: list[Callable[[], object]] = []
    for width, length in ways.values():
        x, grad = torch.randn(shape.rows, width), torch.randn(shape.rows, length)
        weight = torch.nn.Parameter(torch.randn(EXPERTS, length, width))
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        whole, total = torch.randn(length, width), torch.zeros(length, width)
        forward = weight.detach().transpose(1, 2)
        task = ExpertsTask(weight, None, x, grad, ends, torch_accumulate, ExpertGrads())

        ours += [
            partial(loop_product, x, forward, ends),
            partial(loop_product, grad, weight.detach(), ends),
            task.run,
        ]
        dense += [
            partial(torch.mm, x, whole.t()),
            partial(torch.mm, grad, whole),
            partial(total.addmm_, grad.t(), x),
        ]
        of_weights.append(task.run)
        bare.append(partial(loop, main_grad(weight), grad, x, ends))
    found = best({"ours": all_of(ours), "dense": all_of(dense)}, rounds)
    name = "by Zipf's law" if zipf else "balanced"
    claim, ratio = f"F, I and W of experts, {name}", found["ours"] / found["dense"]
    results = [Result(claim, ratio, 1.3 if zipf else 1.15, "x", "dense products")]
    if not zipf:
        found = best({"ours": all_of(of_weights), "bare": all_of(bare)}, rounds)
        ratio = found["ours"] / found["bare"]
        results.append(Result("W of experts", ratio, 1.05, "x", "a loop of addmm"))
    return results


def loop(total: Tensor, grad: Tensor, x: Tensor, ends: Sequence[int]) -> None:
    """Add the gradients of the weights of experts to `total`."""
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        total[expert].addmm_(grad[start:end].t(), x[start:end])


def all_of(functions: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that calls them one after the other."""

    def call() -> None:
        for function in functions:
            function()

    return call


def split_backward(size: Size, rounds: int) -> Result:
    """Compare I and W of a layer with its B."""
    config, _ = size.config()
    spec, cpu = StageSpec(embedding=False, layers=range(1), head=False), torch.device("cpu")
    module = GPTStage(config.model, spec, Sharding(Axis.alone(), False, torch.float32))
    Bucket(0, list(owned_parameters(module)), Axis.alone(), cpu)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter.data, std=0.02)
    stage, mb = Stage(module), MicroBatch(index=0, step=0, seed=0)
    stage.route_autograd_grads()
    x, grad = torch.randn(2, size.sequence, size.batch, size.hidden)
    x.requires_grad_()

    def split() -> None:
        stage.input_grad((0, 0), grad)
        stage.weight_grad((0, 0))

    def after_forward(backward: Callable[[], object]) -> float:
        stage.forward((0, 0), x, mb)
        return seconds(backward, cpu)

    fused = partial(stage.backward, (0, 0), grad)
    times = compare(partial(after_forward, split), partial(after_forward, fused), rounds=rounds)
    return Result("I and W of a layer", times.ratio, 1.05, "x", "its B")


def seconds_of_two(world: World, size: Size, rounds: int) -> list[list[float]]:
    """Return seconds of each round, with all experts on both processes and with half of them on
    each."""
    mesh = world.mesh(Grid(dp=2))
    split = ParallelMesh(Grid(dp=2, ep=2), device=mesh.device, timeout_s=60.0)
    steps = [TrainStep(*slow_link.configured(size, each.grid.ep), each) for each in (mesh, split)]
    return in_turns(steps, Batch(size.vocab, 2 * size.batch, size.batch, size.sequence), rounds)


def two_processes(size: Size, rounds: int) -> Result:
    by_side = zip(*run_world(2, seconds_of_two, size, rounds), strict=True)
    whole, split = (list(map(max, zip(*ranks, strict=True))) for ranks in by_side)
    ratio = statistics.median(a / b for a, b in zip(whole, split, strict=True))
    claim = "two processes: tokens per second, ep 2"
    return Result(claim, ratio, 0.9, "x", "ep 1", at_least=True)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=20, help="timed steps per side (20)")
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    size, rounds = Size("mixtral"), given.rounds
    if given.quick:
        size = Size("mixtral", layers=1, hidden=16, heads=2, vocab=32, sequence=8)
        rounds = 2
    config, _ = size.config()
    width = config.model.moe.expert_ffn_hidden
    shape = Shape(size.batch * size.sequence * TOP_K, size.hidden, width)
    results = [
        *whole_step(size, rounds),
        *products(shape, rounds, zipf=False),
        *products(shape, rounds, zipf=True),
        split_backward(size, rounds),
        two_processes(size, rounds),
        *slow_link.compare(max(1, rounds // 2)),
    ]
    report("Layers with experts", results, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
