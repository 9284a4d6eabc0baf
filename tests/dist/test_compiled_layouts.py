"""Compiled blocks in every kind of layout: collectives are part of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megapipe import TrainStep
from megapipe.errors import ConfigError
from megapipe.ops.compiler import Compiler
from megapipe.testing import World, run_world
from tests.parity.ranks import Case, Outcome, check_case, configure, run_cases
from tests.parity.tiers import in_parts
from tests.parity.traced_compiler import traced_blocks

CASES = [
    Case(tp=2, compile=True),
    Case(
        tp=2,
        pp=2,
        in_process=True,
        schedule="zb_h1",
        sequence_parallel=True,
        model="llama",
        documents=True,
        activations="full",
        compile=True,
    ),
    Case(dp=2, pp=2, chunks=2, in_process=True, schedule="interleaved_1f1b", zero=3, compile=True),
    Case(pp=2, m=3, schedule="zb_h1", model="mixed", activations="stage", compile=True),
    Case(cp=2, model="llama", moe="capacity, position", compile=True),
]
COUNTED = [
    Case(cp=2, model="llama", m=2, compile=True),
    Case(moe="shared, gated", model="gemma", activations="stage", compile=True),
    Case(
        tp=2, ep=2, sequence_parallel=True, moe="groups", model="neox", layers=3, compile=True,
        masked=0.3,
    ),
]  # fmt: skip
"""Cases with two graphs a block, around attention; some layers have experts, and graphs end before
these."""


def run_traced(world: World, cases: Sequence[Case]) -> tuple[list[Outcome], list[int]]:
    """Run cases by graphs that are traced with their backward, but not compiled; return their
    counts, too."""
    outcomes, numbers = [], []
    for case in cases:
        with traced_blocks() as graphs:
            outcomes += run_cases(world, [case])
        numbers.append(len(graphs))
    return outcomes, numbers


@pytest.mark.slow
def test_traced_blocks_in_every_kind_of_layout() -> None:
    results = run_world(2, run_traced, CASES, timeout_s=120)
    for i, case in enumerate(CASES):
        check_case(case, [outcomes[i] for outcomes, _ in results])
        for _, numbers in results:
            assert 2 <= numbers[i] <= 5, "one to train, one to validate, others if run again"


@in_parts("case", COUNTED, full=COUNTED[-1:], ids=lambda case: case.name)
def test_graphs_of_a_block(case: Case) -> None:
    results = run_world(case.world, run_traced, [case], timeout_s=120)
    check_case(case, [outcomes[0] for outcomes, _ in results])
    for _, numbers in results:
        assert numbers == [4], "two to train, two to validate or to run again"


def written_over(name: str, index: int) -> Compiler:
    """Make a compiler whose graphs overwrite an output when they run for the next micro-batch."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        earlier: list[Tensor] = []

        def run(*args: Any) -> Any:
            found = function(*args)
            if earlier:
                earlier.pop().data.copy_(found[index])
            earlier.append(found[index])
            return found

        return run if function.__name__ == name else function

    return compiler


WRONG = [("before_attention", i, "input gradient 0") for i in (1, 2, 3)]
WRONG += [("after_attention", 0, "output 0"), ("no graph", 0, "")]
"""A graph, which of the tensors that leave it, and what is then wrong: of queries, keys and values
what attention computes from them again in its backward."""


def told_by_the_check(world: World, case: Case) -> list[str]:
    lines = []
    for name, index, _ in WRONG:
        config, layout = configure(case)
        with mock.patch("megapipe.assembly.kernels.torch_compile", written_over(name, index)):
            try:
                TrainStep(config, layout, world.mesh(case.grid))
                lines.append("")
            except ConfigError as error:
                lines.append(str(error))
    return lines


@pytest.mark.full
def test_the_check_finds_faults_of_graphs_around_attention() -> None:
    """On every rank, before the first step."""
    for lines in run_world(2, told_by_the_check, Case(cp=2, model="llama", compile=True)):
        for (name, index, what), line in zip(WRONG, lines, strict=True):
            told = f"kernels.compile=true: the {what} of a compiled block is "
            assert line.startswith(told) if what else line == "", (name, index)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_inductor_in_every_kind_of_layout(case: Case) -> None:
    check_case(case, [outcomes[0] for outcomes in run_world(2, run_cases, [case], timeout_s=600)])
