"""Number of kernels that a micro-batch launches, as docs/benchmarks.md says.

A function compiled by inductor counts as one kernel, the rotation as two: inductor has no GPU to
compile for. Attention and norms are left out: a GPU has kernels for them that the CPU lacks.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.distributed.mesh import Grid, ParallelMesh
from megapipe.layers.microbatch import MicroBatch
from megapipe.layout.layout import Layout
from megapipe.ops import loss, rotary, swiglu
from megapipe.train.kernel_selection import agreed_kernels
from tests.fake_cuda.world import run_world
from tests.parity.cases import Case, configure
from tests.parity.collective_recorder import recording
from tests.parity.jobs import ROOT

CHUNK = 128
LAYERS = 3
MODELS = {"gpt2": Case(), "llama": Case(model="llama", tied=False)}
STAGE: dict[str, Any] = {
    "pp": 4,
    "in_process": True,
    "layers": 3 + LAYERS,
    "uneven": True,
    "m": 4,
}
MADE = {"_rotate": 2}
"""Kernels of a compiled function, if not one: the rotation copies what it overwrites."""
Counts = dict[str, float]


class Kernels:
    """Counts kernels. A compiled function counts as one unless :data:`MADE` has it."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.faults: list[str] = []

    def collect(self, *, counted: bool = True) -> None:
        """Add the kernels since the last call, or leave them out."""
        from tests.fake_cuda.preload import own

        noted = own.report()
        self.faults += noted["faults"]
        self.found.update(noted["kernels"] if counted else {})

    def of(self, run: Callable[[], Any]) -> int:
        self.collect(counted=False)
        self.found.clear()
        with recording() as recorder:
            run()
        self.collect()
        return self.found.total() + len(recorder.calls)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.collect()
            result = function(*args)
            self.collect(counted=False)
            self.found[f"compiled {function.__name__}"] += MADE.get(function.__name__, 1)
            return result

        return run


class _Nothing(Function):
    """Returns its first argument, and passes its gradient to all arguments of its shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.alike = [other.shape == x.shape for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *(grad if alike else None for alike in ctx.alike)


def without_attention_and_norms(config: Config, layout: Layout, mesh: ParallelMesh) -> TrainStep:
    chosen = agreed_kernels(config, layout, mesh, layout.schedule)
    kernels = replace(
        chosen,
        attention=lambda q, k, v, p, documents, scores: _Nothing.apply(q, k, v),
        norm=lambda x, *rest: _Nothing.apply(x),
    )
    return TrainStep(config, layout, mesh, kernels=kernels)


@contextmanager
def counting(*, inductor: bool) -> Iterator[Kernels]:
    kernels = Kernels()
    with ExitStack() as patches:
        for module in (loss, rotary, swiglu) if inductor else ():
            for name, new in (
                ("needs_inductor", lambda device: None),
                ("compile_rows" if module is swiglu else "compile_elementwise", kernels.compiled),
            ):
                patches.enter_context(mock.patch.object(module, name, new))
        yield kernels
    kernels.collect()
    assert not kernels.faults


def stage_of(case: Case, step: TrainStep, number: int) -> tuple[Any, Tensor, MicroBatch]:
    """Return stage `number`, an input of it, and a micro-batch."""
    local = case.sequence // (case.tp if case.sequence_parallel else 1)
    shape = (case.batch, case.sequence)
    hidden = step.config.model.hidden
    x = torch.ones(local, case.batch, hidden, dtype=torch.bfloat16, device="cuda")
    labels = torch.ones(shape, dtype=torch.int64, device="cuda")
    return step.stages[number], x, MicroBatch(0, 0, 1, labels=labels, mask=labels > 0)


def of_block(world: Any, case: Case, inductor: bool) -> Counts:
    """Count the kernels and collectives of one block."""
    with counting(inductor=inductor) as kernels:
        config, layout = configure(case)
        mesh = world.mesh(Grid(tp=case.tp), "cuda")
        step = without_attention_and_norms(config, layout, mesh)
        stage, x, mb = stage_of(case, step, 1)
        stage.begin(train=True)
        stage.forward((9, 0), x, mb)  # what is made once
        counts = {
            "F": kernels.of(lambda: stage.forward((0, 0), x, mb)),
            "I": kernels.of(lambda: stage.input_grad((0, 0), x)),
            "W": kernels.of(lambda: stage.weight_grad((0, 0))),
        }
    return {kind: count / LAYERS for kind, count in counts.items()}


def of_chunk(world: Any, case: Case, inductor: bool) -> int:
    """Count the kernels and collectives of one more loss chunk."""
    counts = []
    with counting(inductor=inductor) as kernels:
        for chunks in (2, 3):
            more = replace(case, loss_chunk=CHUNK, sequence=chunks * CHUNK // case.batch)
            config, layout = configure(more)
            mesh = world.mesh(Grid(tp=case.tp), "cuda")
            step = without_attention_and_norms(config, layout, mesh)
            stage, x, mb = stage_of(more, step, 3)
            stage.begin(train=True)
            stage.forward((0, 0), x, mb)
            counts.append(kernels.of(lambda: stage.input_grad((0, 0), None)))  # noqa: B023
    return counts[1] - counts[0]


def rows(world: Any) -> list[list[str]]:
    """Return the rows of the table in docs/benchmarks.md that this world can count."""
    found = []
    for name, given in MODELS.items():
        for inductor in (False, True):
            case = replace(given, **STAGE, dtype="bf16", tp=world.size)
            block = of_block(world, case, inductor)
            numbers = [
                *(f"{block[kind]:g}" for kind in "FIW"),
                str(of_chunk(world, case, inductor)),
            ]
            found.append([name, str(world.size), "inductor" if inductor else "torch", *numbers])
    return found


@pytest.mark.slow
def test_the_table_is_what_is_counted() -> None:
    counted = [row for ranks in (1, 2) for row in run_world(ranks, rows)[0]]
    print("\n".join("| " + " | ".join(row) + " |" for row in counted))
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## Kernels of a block")
    table = [re.split(r" *\| *", line.strip("| ")) for line in section.splitlines() if "|" in line]
    assert counted == table[2 : 2 + len(counted)]
    assert all(int(row[-1]) <= 8 for row in counted if "inductor" in row)
