"""Stages of several holders are reduced as soon as the last of them is through, and no bit differs
from what reductions after all operations give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest

from megapipe.engine import pipeline
from megapipe.schedule.data_parallel import with_zero_actions
from megapipe.schedule.program import ActionKind, Program
from megapipe.testing import World, run_world
from tests.parity.bitwise import assert_bitwise
from tests.parity.ranks import Case, Outcome, run_case

CHIMERA = Case(pp=2, m=4, schedule="chimera", dtype="fp32", tied=False)
PAIRS = [
    CHIMERA,
    replace(CHIMERA, schedule="gems"),
    replace(CHIMERA, schedule="bitpipe", chunks=2, tied=True),
    replace(CHIMERA, schedule="dualpipe", dtype="fp64", zero=0),
]
FOURS = [replace(case, pp=4, m=8, layers=8) for case in PAIRS]
REPLICATED = [
    replace(case, dp=2, zero=zero) for case, zero in zip(PAIRS, (1, 2, 0, 3), strict=True)
]


def to_the_end(program: Program) -> Program:
    """Move the reductions behind all other actions, sorted by stage: an order that all ranks
    share."""
    late = [action for action in program.actions if action.do == ActionKind.REDUCE]
    rest = [action for action in program.actions if action.do != ActionKind.REDUCE]
    late.sort(key=lambda action: action.stage)
    return Program(program.rank, (*rest, *late))


def operations_left(program: Program) -> int:
    """Count the operations after the first reduction."""
    kinds = [action.do for action in program.actions]
    return kinds[kinds.index(ActionKind.REDUCE) :].count(ActionKind.COMPUTE)


def both_ways(world: World, cases: list[Case]) -> list[tuple[int, Outcome, Outcome]]:
    """Return, for each case, the operations after this rank's first reduction, and the outcomes of
    the programs as they are and with reductions at their ends."""
    found = []
    for case in cases:
        left: list[int] = []

        def lazily(*given: object, left: list[int] = left) -> Iterator[Program]:
            for program in with_zero_actions(*given):
                late = to_the_end(program)
                if any(
                    action.do == ActionKind.REDUCE for action in late.actions
                ):  # not of a validation
                    left.append(operations_left(program))
                    assert operations_left(late) == 0
                yield late

        eager = run_case(world, case)
        with mock.patch.object(pipeline, "with_zero_actions", lazily):
            lazy = run_case(world, case)
        found.append((max(left), eager, lazy))
    return found


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(PAIRS, id="2 ranks", marks=pytest.mark.slow),
        pytest.param(FOURS, id="4 ranks", marks=pytest.mark.full),
        pytest.param(REPLICATED, id="2 ranks, 2 replicas", marks=pytest.mark.slow),
    ],
)
def test_reductions_in_between_change_no_bit(cases: list[Case]) -> None:
    ranks = run_world(cases[0].world, both_ways, cases)
    for i, case in enumerate(cases):
        left, eager, lazy = zip(*(rank[i] for rank in ranks), strict=True)
        assert max(left) > 0, f"{case.name}: no reduction is before the last operation"
        assert_bitwise(list(eager), list(lazy))
        assert all(outcome.losses[0] != outcome.losses[-1] for outcome in eager)
