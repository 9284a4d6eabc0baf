"""Whole training steps on one GPU, 124M to 7B parameters: ``python benchmarks/gpu_ladder.py``.

For each size it measures the best rates of the device at the model's shapes, the largest
micro-batch that fits without recomputation, and the median of 20 steps, plain and compiled, against
Hugging Face's model in a usual loop. At one size, settings are changed one at a time. Each size and
side runs in a separate process, within a share of the time; what did not fit into it is listed.

A model FLOPs utilisation (MFU) counts 6N + 12 L H Q T FLOPs per token and divides by the dense peak
in bf16. N are the parameters in matrix products, with the head and without embeddings; attention
counts in full although it is causal (PaLM, 2204.02311, appendix B).
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from common import parser
from ladder.bench import Work
from ladder.jobs import plan, run_all
from ladder.report import Report
from ladder.sizes import LADDER, TOY
from ladder.tables import dense_peak, finish

PARTS = ("ours", "peer", "ablations")


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = parser(__doc__.partition("\n")[0])
    names = [size.name for size in LADDER]
    options.add_argument("--budget-s", type=float, default=540.0, help="seconds for it all (540)")
    options.add_argument("--steps", type=int, default=20, help="timed steps (20)")
    options.add_argument("--sizes", nargs="+", choices=names, default=names, help="default: all")
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    options.add_argument("--ablate", choices=names, default="350M", help="size of the ablations")
    options.add_argument("--no-compile", action="store_true", help="compile neither side")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="write a report there")
    given = options.parse_args(arguments)
    if given.steps < 1 or given.budget_s <= 0:
        options.error("--steps and --budget-s must be above 0")
    gpu = torch.cuda.is_available()
    if not gpu and not given.quick:
        options.error("needs a CUDA device; --quick shows on the CPU that it runs")
    device = torch.device("cpu" if given.quick else "cuda")
    sizes = [TOY] if given.quick else [size for size in LADDER if size.name in given.sizes]
    ablated = next((size for size in sizes if size.name == given.ablate), sizes[0])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "records.jsonl"
        file.touch()
        template = Work(
            job="ours",
            size=sizes[0].name,
            device=device.type,
            file=str(file),
            until=time.time(),
            steps=2 if given.quick else given.steps,
            compile=not (given.quick or given.no_compile),
        )
        records = run_all(plan(sizes, given.parts, ablated, template), given.budget_s)
    found = Report(records, dense_peak(device))
    finish(
        "One GPU, whole steps",
        ["python", "benchmarks/gpu_ladder.py", *arguments],
        device,
        found.results(),
        found.tables(),
        json=given.json,
        markdown=given.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
