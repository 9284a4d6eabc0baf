"""Training with positions that are split over ranks, beside the parity matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.config import Config
from megapipe.errors import DataError
from megapipe.layout.layout import Layout
from megapipe.ops.tile_attention import CpuFlash
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.cases import END
from tests.parity.context_faults import FAULTS
from tests.parity.expected import expected
from tests.parity.faults import outcomes_of_faults
from tests.parity.ranks import Case, Rows, check_case, configure, run_case, run_cases
from tests.parity.tiers import in_parts, one_of, selected

DOCUMENTS = Case(cp=4, context="usp", documents=True, masked=0.3, sequence=16)
KEPT = Case(cp=2, context="ulysses", model="llama", kv_heads=1)
CASES = [
    Case(cp=3, model="llama", sequence=12),
    Case(cp=3, context="helpers", documents=True, sequence=12),
    replace(DOCUMENTS, model="qwen", kv_heads=2),
    Case(cp=4, context="ulysses", model="llama", kv_heads=1, sequence=16),
    Case(cp=2, pp=2, schedule="seq1f1b", slices=2, m=3, sequence=16),
    Case(
        cp=4, context="usp", schedule="terapipe", slices=3, m=2, sequence=24, documents=True,
        model="llama", kv_heads=2,
    ),
    Case(cp=2, tp=2, schedule="seq1f1b", slices=2, sequence=16, sequence_parallel=True),
    Case(cp=4, context="all_gather", schedule="seq1f1b", slices=2, m=2, sequence=16),
    Case(cp=4, context="double ring", schedule="seq1f1b", slices=2, m=2, sequence=16),
    Case(cp=2, pp=2, schedule="chimera", dp=2, zero=2, tied=False),
    Case(cp=4, context="own", documents=True, sequence=16),
    Case(cp=2, context="own", schedule="seq1f1b", slices=2, sequence=16),
    *(
        replace(KEPT, activations=policy)
        for policy in ("full, attention kept", "selective, attention kept", "stage, attention kept")
    ),
    Case(activations="full, attention kept", documents=True, model="llama"),
]  # fmt: skip


@in_parts(
    ("world", "every"),
    [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (8, 1)],
    default=[(1, 1), (2, 1), (3, 1)],
    full=[(4, 2)],
)
def test_cases(world: int, every: int) -> None:
    cases = [case for case in CASES if case.world == world][::every]
    results = run_world(world, run_cases, cases)
    for i, case in enumerate(cases):
        try:
            check_case(case, [rank[i] for rank in results])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


def count_blocks(world: World, cases: Sequence[Case]) -> list[int]:
    """Return how often the steps of each case call the attention kernel."""
    counts = []
    for case in cases:
        with mock.patch.object(
            CpuFlash, "forward", autospec=True, side_effect=CpuFlash.forward
        ) as kernel:
            run_case(world, case, validate=False)
        counts.append(kernel.call_count)
    return counts


def test_how_often_what_is_run_again_attends() -> None:
    """Attention runs once per micro-batch and layer where its results are saved, twice without;
    each time a rank calls the kernel for the pairs of the plan that it computes, also for other
    ranks."""
    cases = [
        replace(KEPT, context=context, activations=policy, layers=3, m=2)
        for context in ("ulysses", "ring", "helpers")
        for policy in ("full, attention kept", "full")
    ]
    for case, *counts in zip(cases, *run_world(2, count_blocks, cases), strict=True):
        plan = configure(case)[1].context.forward
        pairs = [sum(pair is not None for pair in part.pairs) for part in plan.forward_parts]
        attentions = case.steps * case.m * case.layers * (1 if "kept" in case.activations else 2)
        # all of a group that splits heads compute the pairs of one place of the ring
        assert counts == [attentions * n for n in pairs] * (case.cp // len(pairs)), case.name
    assert pairs == [1, 2]


def run_anew(world: World, cases: Sequence[Case]) -> list[Any]:
    """Run with positions that begin anew in each document."""

    def anew(case: Case) -> tuple[Config, Layout]:
        config, layout = configure(case)
        data = config.data.model_copy(update={"reset_position_ids": True})
        return config.model_copy(update={"data": data}), layout

    with mock.patch("tests.parity.ranks.configure", anew):
        return run_cases(world, cases)


def positions_in_documents(tokens: Tensor) -> Tensor:
    rows = []
    for row in tokens.tolist():
        rows.append([0])
        for token in row[:-1]:
            rows[-1].append(0 if token == END else rows[-1][-1] + 1)
    return torch.tensor(rows)


def test_positions_that_begin_anew_in_each_document() -> None:
    """Positions are those of the whole row; each rank is given its part."""
    cases = [
        replace(DOCUMENTS, cp=2, context="ring"),
        Case(cp=2, documents=True, schedule="seq1f1b", slices=2, sequence=16),
    ]
    results = run_world(2, run_anew, cases)
    with mock.patch.object(reference, "positions_of", positions_in_documents):
        expected.cache_clear()
        for i, case in enumerate(cases):
            check_case(case, [rank[i] for rank in results])
    expected.cache_clear()


class _Elsewhere(Rows):
    """Batches whose samples differ on one rank."""

    def __init__(self, case: Case, *, other: bool) -> None:
        super().__init__(case)
        self.other = other

    def __call__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        tokens, labels, mask = super().__call__(indices)
        return (tokens.roll(1, 0) if self.other else tokens), labels, mask


def told(world: World, case: Case, other: int | None) -> str:
    config, layout = configure(case)
    step = TrainStep(config, layout, world.mesh(case.grid))
    try:
        step.train(0, _Elsewhere(case, other=world.rank == other))
    except DataError as error:
        return str(error)
    return ""


@in_parts(("other", "of"), [(1, "0"), (2, "3"), (3, "2"), (None, "")], full=[(2, "3")])
def test_ranks_that_share_samples_compare_them(other: int | None, of: str) -> None:
    """With pipeline.debug, on every rank; ranks 0 and 1 are of a cp group, and 2 and 3."""
    case = Case(dp=2, cp=2, debug=True, batch=2, m=2)
    lines = run_world(4, told, case, other)
    if other is None:
        assert lines == [""] * 4
        return
    (line,) = set(lines)
    wrong, right = max(other, int(of)), min(other, int(of))
    assert line.startswith(f"rank {wrong} got other samples for step 0 than rank {right}, ")
    assert "(parallel.cp)" in line


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, full=3, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match=r"difference is|own it"):
        check_case(FAULTS[fault], outcomes[fault.__name__])


@one_of(3)
def test_the_cases_pass_without_a_fault(some: slice) -> None:
    given = [*dict.fromkeys(FAULTS.values())][some]
    for size in sorted({case.world for case in given}):
        cases = [case for case in given if case.world == size]
        results = run_world(size, run_cases, cases)
        for i, case in enumerate(cases):
            check_case(case, [rank[i] for rank in results])
