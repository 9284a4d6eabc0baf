"""MoE layers on one GPU: ``python benchmarks/gpu_experts.py``.

- The products of experts at 16k rows, grouped, against dense products of as many FLOPs, if all
  experts get as many rows, and if they get them by Zipf's law.
- Whole steps (:mod:`gpu_ladder`) of a model of 3.0B parameters of which a token uses 0.59B, against
  a dense model with as many, and against transformers' Mixtral with its grouped products.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from common import Result, parser, seconds
from ladder.bench import Work
from ladder.jobs import plan, run_all
from ladder.memory import release
from ladder.report import Report
from ladder.sizes import DENSE, MIXTURE, TOY_DENSE, TOY_MIXTURE, Size
from ladder.tables import Table, dense_peak, finish
from moe import numbers
from torch import Tensor

from megapipe.layers.moe.tasks import ExpertsTask
from megapipe.layers.moe.weights import ExpertGrads
from megapipe.model.gpt.parameters import known
from megapipe.ops import weight_grad
from megapipe.ops.moe import grouped
from megapipe.ops.probe import choose_kernel

ROWS = 16384
"""Rows of all experts together."""
Call = Callable[[], object]


class Products:
    """Forward, input gradients and weight gradients of both products, of experts and dense ones of
    as many FLOPs, each with the kernel that a model takes."""

    def __init__(self, size: Size, rows: int, device: torch.device, *, zipf: bool) -> None:
        moe, hidden = size.model.moe, size.hidden
        experts, ffn = moe.experts_of(0), known(moe.expert_ffn_hidden)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        ends = list(accumulate(numbers(rows, experts, zipf=zipf)))
        widths = [hidden, ffn, 2 * ffn]
        offered = grouped.candidates(device=device, dtype=dtype, widths=widths)
        product = choose_kernel("expert_gemm", "auto", offered)
        adding = choose_kernel(
            "weight_grad", "auto", weight_grad.candidates(device=device, dtype=dtype)
        ).kernel
        self.kernel = product.name
        self.ours: dict[str, list[Call]] = {"F": [], "I": [], "W": []}
        self.dense: dict[str, list[Call]] = {"F": [], "I": [], "W": []}

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        for width, length in ((hidden, 2 * ffn), (ffn, hidden)):
            x, grad, whole = normal(rows, width), normal(rows, length), normal(length, width)
            weight = torch.nn.Parameter(normal(experts, length, width))
            weight.main_grad = torch.zeros(weight.shape, device=device)  # type: ignore[attr-defined]
            total = torch.zeros(whole.shape, device=device)
            matrices = weight.detach()
            task = ExpertsTask(weight, None, x, grad, ends, adding, ExpertGrads())
            self.ours["F"].append(partial(product.kernel, x, matrices.transpose(1, 2), ends))
            self.ours["I"].append(partial(product.kernel, grad, matrices, ends))
            self.ours["W"].append(task.run)
            self.dense["F"].append(partial(torch.mm, x, whole.t()))
            self.dense["I"].append(partial(torch.mm, grad, whole))
            self.dense["W"].append(partial(adding, total, grad, x))


def rates(size: Size, rows: int, device: torch.device, rounds: int) -> tuple[list[Result], Table]:
    """Return the rates of the products of experts, divided by those of dense ones."""
    results, lines = [], []
    for zipf in (False, True):
        products = Products(size, rows, device, zipf=zipf)
        spread = "by Zipf's law" if zipf else "balanced"
        for kind in ("F", "I", "W"):
            ours, dense = fastest([products.ours[kind], products.dense[kind]], device, rounds)
            claim = f"rate of {kind} of experts at {rows:,} rows, {spread}"
            results.append(Result(claim, dense / ours, 0.85, "x", "dense products", at_least=True))
            lines.append([kind, spread, products.kernel, f"{1e3 * ours:.4g}", f"{1e3 * dense:.4g}"])
        del products
        release()
    return results, Table("Both products", ["kind", "rows", "kernel", "ms", "dense ms"], lines)


def fastest(sides: Sequence[Sequence[Call]], device: torch.device, rounds: int) -> list[float]:
    """Return seconds of each side's calls together, by turns: the fastest of `rounds` blocks."""
    calls = 10 if device.type == "cuda" else 1

    def block(side: Sequence[Call]) -> None:
        for _ in range(calls):
            for call in side:
                call()

    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds + 1):
        for times, side in zip(found, sides, strict=True):
            times.append(seconds(partial(block, side), device) / calls)
    return [min(times[1:]) for times in found]


def steps_of(found: Report, mixture: Size, dense: Size) -> list[Result]:
    """Return the claims on the MoE model's step against those with which it is compared."""
    results = []
    ours, plain = found.best(mixture, "megapipe"), found.best(dense, "megapipe")
    peer = found.best(mixture, "Hugging Face")
    if ours and plain:
        ratio = ours.tokens_per_second * mixture.flops / plain.tokens_per_second / dense.flops
        claim = "model FLOPs utilisation of the mixture"
        results.append(Result(claim, ratio, 0.8, "x", "dense model", at_least=True))
    if ours and peer:
        ratio = peer.tokens_per_second / ours.tokens_per_second
        claim, name = "time per token of the mixture", f"Hugging Face, {peer.setting}"
        results.append(Result(claim, ratio, 0.8, "x", name))
    return results


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--budget-s", type=float, default=240.0, help="for whole steps (240)")
    options.add_argument("--steps", type=int, default=10, help="timed steps (10)")
    options.add_argument("--rows", type=int, help="of a micro-batch (the largest that fits)")
    options.add_argument("--rounds", type=int, default=7, help="timed blocks of products (7)")
    options.add_argument("--no-compile", action="store_true", help="compile neither side")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="write a report there")
    given = options.parse_args(arguments)
    if min(given.steps, given.rounds, given.rows or 1) < 1 or given.budget_s <= 0:
        options.error("--steps, --rounds, --rows and --budget-s must be above 0")
    if not torch.cuda.is_available() and not given.quick:
        options.error("needs a CUDA device; --quick shows on the CPU that it runs")
    device = torch.device("cpu" if given.quick else "cuda")
    mixture, dense = (TOY_MIXTURE, TOY_DENSE) if given.quick else (MIXTURE, DENSE)
    results, table = rates(mixture, 64 if given.quick else ROWS, device, given.rounds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.jsonl"
        file.touch()
        template = Work(
            job="ours",
            size=mixture.name,
            device=device.type,
            file=str(file),
            until=time.time(),
            steps=2 if given.quick else given.steps,
            compile=not (given.quick or given.no_compile),
            rows=given.rows,
        )
        jobs = [*plan([mixture, dense], ["ours"], None, template)]
        jobs += plan([mixture], ["peer"], None, template)
        found = Report(run_all(jobs, given.budget_s), dense_peak(device))
    finish(
        "Experts on one GPU",
        ["python", "benchmarks/gpu_experts.py", *arguments],
        device,
        [*results, *steps_of(found, mixture, dense)],
        [table, *found.tables()],
        json=given.json,
        markdown=given.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
