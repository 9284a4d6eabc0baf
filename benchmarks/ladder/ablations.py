"""One setting changed at a time, at one size and micro-batch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import split_backward
import torch
from common import seconds

from ladder.bench import Bench
from ladder.memory import release
from ladder.records import Ablation, Split
from ladder.sides import Ours
from ladder.sizes import Settings, known_changes, words
from ladder.whole_steps import COMPILE

SPLIT: Settings = {"pipeline": {"schedule": "zb_h1"}}
CHANGES: list[Settings] = [
    SPLIT,
    COMPILE,
    {"kernels": {"only": {"attention": "flash"}}},
    {"kernels": {"only": {"attention": "cudnn"}}},
    {"kernels": {"only": {"attention": "efficient"}}},
    {"kernels": {"loss_chunk_tokens": 0}},
    {"kernels": {"only": {"weight_grad": "torch"}}},
    {"kernels": {"only": {"norm": "torch"}}},
    {"kernels": {"only": {"swiglu": "torch"}}},
    {"kernels": {"only": {"optimizer": "torch"}}},
    {"kernels": {"only": {"optimizer": "apex"}}},
]
"""Changes, one at a time, against the defaults; those whose keys exist."""
STEPS = 7
"""Number of steps timed with each change."""


def ablations(bench: Bench) -> None:
    """Time the split backward of a few layers against autograd's, and each change by itself."""
    rows = bench.work.rows
    assert rows is not None
    base, used = _base(bench, rows)
    release()
    bench.attempt(lambda: _split(bench), "I + W against autograd")
    for change in known_changes(CHANGES):
        if (change == COMPILE and not bench.work.compile) or changes_nothing(change, used):
            continue
        if bench.left() < 0:
            bench.missing(words(change), "no time left")
            continue

        def measure(change: Settings = change) -> None:
            side = Ours(bench.size, bench.mesh, rows, change)
            changed = _median(bench, side.step)
            bench.notebook.add(Ablation(bench.size.name, words(change), rows, changed, base))

        bench.attempt(measure, words(change))


def _base(bench: Bench, rows: int) -> tuple[float, dict[str, str]]:
    """Return seconds of a step with the defaults, and the kernels that they are, by purpose."""
    side = Ours(bench.size, bench.mesh, rows)
    base = _median(bench, side.step)
    _update_alone(bench, side)
    return base, {choice.purpose: choice.name for choice in side.train.kernels.choices}


def _update_alone(bench: Bench, side: Ours) -> None:
    """Time the update against that of torch.optim.AdamW without its fused kernel."""
    plain = [
        torch.zeros_like(parameter, dtype=torch.float32)
        for module in side.train.modules.values()
        for parameter in module.parameters()
    ]
    for parameter in plain:
        parameter.grad = torch.ones_like(parameter)
    peer = torch.optim.AdamW(plain, foreach=True)
    base = _median(bench, lambda: side.train.optimizer.update(1e-4))
    change = "update alone: AdamW of torch, not fused, without bf16 weights"
    plainly = _median(bench, peer.step)
    bench.notebook.add(Ablation(bench.size.name, change, side.rows, plainly, base))


def _median(bench: Bench, run: Callable[[], object]) -> float:
    for _ in range(2):
        run()
    steps = range(min(STEPS, bench.work.steps))
    return statistics.median(seconds(run, bench.device) for _ in steps)


def _split(bench: Bench) -> None:
    layers, gpu = 4, bench.device.type == "cuda"
    size = split_backward.Size(
        layers=layers,
        hidden=bench.size.hidden,
        heads=bench.size.heads,
        sequence=bench.size.sequence,
        batch=max(1, (16384 if gpu else 1) // bench.size.sequence),
        dtype="bf16" if gpu else "fp32",
        device=bench.device.type,
    )
    rounds = 9 if gpu else 3
    result = split_backward.measure(size, rounds=rounds, layers_per_round=4 * layers)
    bench.notebook.add(Split(bench.size.name, layers, result.value))


def changes_nothing(change: Settings, used: Mapping[str, str]) -> bool:
    """Whether `change` names a kernel that the defaults have anyway, or that the model does not
    use."""
    return any(
        used.get(operation) in (name, None)
        for operation, name in change.get("kernels", {}).get("only", {}).items()
    )
