"""Pipelines of 2 to 64 GPUs, projected from one: ``python benchmarks/gpu_projection.py``.

One process runs all ranks of a small pipeline on one GPU and times each operation by events of the
device: F and B under 1F1B, F, I and W under zb_h1. From these come the times of a layer, of the
embedding and of the head. They give the costs of every stage of a pipeline of p ranks with as many
layers per rank, partitioned by cost. Every registered schedule is then simulated at these costs.
Messages are assumed to take a latency and their size divided by a bandwidth, within a node of 8 and
between nodes; the update and communication between replicas are left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Result, parser
from ladder.memory import release
from ladder.projection import Links, Measured, Projection, parts_of, project_all
from ladder.sides import Ours, single_mesh
from ladder.sizes import LADDER, TOY, Settings, Size, size_of
from ladder.tables import Table, dense_peak, finish

from megapipe.distributed.mesh import ParallelMesh
from megapipe.engine.recorder import measured_cost, timeline
from megapipe.model.partition import from_counts
from megapipe.schedule.generators import names

RANKS = 4
"""Ranks of the measured pipeline: two of its stages have layers only."""
MICROBATCHES = 8
KINDS = ("F", "I", "W", "B")
SPLIT_COST = 1.03
GAPS = 1.05


def measure(size: Size, rows: int, layers: int, steps: int, mesh: ParallelMesh) -> Measured:
    """Run the in-process pipeline under both schedules."""
    model = replace(size, layers=RANKS * layers, microbatches=MICROBATCHES)
    fused, _ = costs_of(model, rows, layers, "1f1b", steps, mesh)
    release()
    split, gaps = costs_of(model, rows, layers, "zb_h1", steps, mesh)
    tables = {"F": split["F"], "I": split["I"], "W": split["W"], "B": fused["B"]}
    ratios = [(i + w) / b for i, w, b in zip(tables["I"], tables["W"], tables["B"], strict=True)]
    parts = {kind: parts_of(times, layers) for kind, times in tables.items()}
    return Measured(size, rows, layers, parts, statistics.median(ratios), gaps)


def costs_of(
    size: Size, rows: int, layers: int, name: str, steps: int, mesh: ParallelMesh
) -> tuple[dict[str, list[float]], float]:
    """Return seconds by kind and stage, and the gaps, of one schedule."""
    changes: Settings = {
        "parallel": {"pp": RANKS},
        "pipeline": {
            "schedule": name,
            "transport": "in_process",
            "stage_layout": from_counts([layers] * RANKS),
        },
    }
    side = Ours(size, mesh, rows, changes)
    schedule = side.train.schedule
    for _ in range(2):
        side.step(record=True)
    records, gaps = [], []
    for _ in range(steps):
        side.step(record=True)
        found = side.train.records()
        records += found
        line = timeline(schedule, found)
        gaps.append(float(line.makespan) / sum(map(float, line.busy)))
    cost = measured_cost(schedule, records)
    tables = {}
    for kind in KINDS:
        times = getattr(cost, kind)
        assert isinstance(times, tuple)
        tables[kind] = [float(seconds) for seconds in times]
    return tables, statistics.median(gaps)


def tables_of(
    measured: Measured,
    found: Sequence[Projection],
    missing: Sequence[tuple[str, int, str]],
    peak: float | None,
    per_rank: int,
) -> list[Table]:
    costs = Table(
        f"Measured on one GPU: ms per micro-batch of {measured.rows} x {measured.size.sequence} "
        f"tokens, hidden {measured.size.hidden}",
        ["operation", "embedding", "layer", "head"],
        [
            [kind, *(f"{1e3 * t:.4g}" for t in (parts.embedding, parts.layer, parts.head))]
            for kind, parts in measured.parts.items()
        ],
    )
    ranks = sorted({each.ranks for each in found})
    about = f"{measured.layers} layers per rank, {per_rank} micro-batches per rank"
    bubble = {(each.schedule, each.ranks): f"{100 * each.bubble:.1f}" for each in found}
    held = {(each.schedule, each.ranks): f"{each.held:g}" for each in found}
    if peak is None:
        title = f"Projected TFLOP/s per GPU, {about}"
        speed = {(each.schedule, each.ranks): f"{each.tflops:.4g}" for each in found}
    else:
        title = f"Projected MFU, % of {peak:g} TFLOP/s, {about}"
        speed = {(each.schedule, each.ranks): f"{100 * each.tflops / peak:.1f}" for each in found}
    schedules = list(dict.fromkeys(each.schedule for each in found))
    headings = ["schedule", *(f"p = {p}" for p in ranks)]

    def grid(title: str, values: Mapping[tuple[str, int], str]) -> Table:
        rows = [[name, *(values.get((name, p), "-") for p in ranks)] for name in schedules]
        return Table(title, headings, rows)

    tables = [
        costs,
        grid(title, speed),
        grid(f"Projected bubble, % of the makespan, {about}", bubble),
        grid("Activations held at most by a rank, in micro-batches of all its layers", held),
    ]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, p, why in missing:
        reasons.setdefault((name, why), []).append(str(p))
    rows = [[name, ", ".join(sizes), why] for (name, why), sizes in reasons.items()]
    return [*tables, Table("Not projected", ["schedule", "p", "why"], rows)] if rows else tables


def results_of(measured: Measured, found: Sequence[Projection]) -> list[Result]:
    results = [
        Result("I + W of a stage, by events", measured.split, SPLIT_COST, "x", "B of the stage"),
        Result("operations from first to last", measured.gaps, GAPS, "x", "sum of their times"),
    ]
    makespans = {(each.schedule, each.ranks): each.makespan for each in found}
    for each in found:
        if each.schedule == "zb_h1" and ("1f1b", each.ranks) in makespans:
            ratio = each.makespan / makespans["1f1b", each.ranks]
            claim = f"projected step of zb_h1, p = {each.ranks}"
            results.append(Result(claim, ratio, 1.0, "x", "1f1b"))
    return results


def options() -> argparse.ArgumentParser:
    assert __doc__ is not None
    given = parser(__doc__.partition("\n")[0])
    sizes = [size.name for size in LADDER]
    given.add_argument("--size", choices=sizes, default="1.3B", help="whose layers (1.3B)")
    given.add_argument("--microbatch", type=int, default=4, help="sequences of a micro-batch (4)")
    given.add_argument("--layers", type=int, default=4, help="layers per rank (4)")
    given.add_argument("--steps", type=int, default=10, help="measured steps (10)")
    given.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="p")
    given.add_argument("--per-rank", type=int, default=4, help="micro-batches per rank (4)")
    given.add_argument(
        "--schedules", nargs="+", choices=names(), default=list(names()), metavar="NAME"
    )
    links: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("NODE", "NETWORK")}
    given.add_argument("--latency-us", **links, default=(10, 20), help="of a message (10 20)")
    given.add_argument("--bandwidth-gbs", **links, default=(300, 40), help="of a link (300 40)")
    given.add_argument("--budget-s", type=float, default=300.0, help="seconds to simulate (300)")
    given.add_argument("--markdown", type=Path, metavar="FILE", help="write a report there")
    return given


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser_ = options()
    given = parser_.parse_args(arguments)
    if min(given.microbatch, given.layers, given.steps, given.per_rank, *given.ranks) < 1:
        parser_.error("sizes and counts must be at least 1")
    if not torch.cuda.is_available() and not given.quick:
        parser_.error("needs a CUDA device; --quick shows on the CPU that it runs")
    device = torch.device("cpu" if given.quick else "cuda")
    size, rows, layers, steps = size_of(given.size), given.microbatch, given.layers, given.steps
    ranks, schedules = given.ranks, given.schedules
    if given.quick:
        torch.set_num_threads(1)
        size, rows, layers, steps = TOY, 2, 1, 2
        ranks, schedules = [2, 4], ["1f1b", "zb_h1", "zb_v", "dualpipe"]
    measured = measure(size, rows, layers, steps, single_mesh(device))
    links = Links(
        latency=(given.latency_us[0] * 1e-6, given.latency_us[1] * 1e-6),
        bandwidth=(given.bandwidth_gbs[0] * 1e9, given.bandwidth_gbs[1] * 1e9),
    )
    found: list[Projection] = []
    missing: list[tuple[str, int, str]] = []
    for each in project_all(measured, links, schedules, ranks, given.per_rank, given.budget_s):
        if isinstance(each, Projection):
            found.append(each)
        else:
            missing.append(each)
    peak = dense_peak(device)
    finish(
        "Pipelines projected from one GPU",
        ["python", "benchmarks/gpu_projection.py", *arguments],
        device,
        results_of(measured, found),
        tables_of(measured, found, missing, peak, given.per_rank),
        json=given.json,
        markdown=given.markdown,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
