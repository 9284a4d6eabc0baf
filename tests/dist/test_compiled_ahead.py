"""All graphs of steps and validation are compiled before them: a compiler may wait for the device,
and on a GPU a receive that is posted ahead is part of what it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.testing import World, run_world
from tests.parity.ranks import Case, Rows, configure

CASES = [
    Case(pp=2, m=4, schedule="interleaved_1f1b", chunks=2, compile=True),
    Case(pp=2, m=4, schedule="1f1b", activations="full", compile=True),
    Case(pp=2, m=4, schedule="zb_h1", activations="stage", documents=True, compile=True),
    Case(pp=2, m=4, schedule="chimera_backward_halving", activations="full", compile=True),
]


def graphs(world: World, cases: Sequence[Case]) -> list[tuple[int, int]]:
    """Return, for each case, how many graphs are made before the first step, and in two steps and a
    validation."""
    counts = []
    for case in cases:
        torch.compiler.reset()
        made: list[Any] = []

        def backend(graph: Any, _inputs: Any, made: list[Any] = made) -> Any:
            made.append(graph)
            return graph.forward

        def compiler(function: Any, backend: Any = backend) -> Any:
            return torch.compile(function, fullgraph=True, dynamic=False, backend=backend)

        with mock.patch("megapipe.assembly.kernels.torch_compile", compiler):
            config, layout = configure(case)
            step = TrainStep(config, layout, world.mesh(Grid(pp=case.pp)), document_end=5)
            before = len(made)
            for i in range(2):
                step.train(i, Rows(case))
            step.evaluate(Rows(case), 2 * case.batch)
        counts.append((before, len(made) - before))
    return counts


@pytest.mark.full
def test_every_graph_is_there_when_the_first_step_begins() -> None:
    for counts in run_world(2, graphs, CASES, timeout_s=120):
        for case, (before, within) in zip(CASES, counts, strict=True):
            assert before >= 1, case.name
            assert within == 0, case.name
