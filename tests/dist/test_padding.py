"""Experts with room for the largest number of rows compute the same as with room for the actual
rows.

That the host then waits for nothing is in tests/fake_cuda/test_host_waits.py, and bytes are in
tests/dist/test_dispatch.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from megapipe.assembly import sharding
from megapipe.layers.moe import dispatchers
from megapipe.layers.moe.dispatch import Dispatcher
from megapipe.layers.moe.permutation import count_rows
from megapipe.testing import World, run_world
from tests.parity.bitwise import check_groups
from tests.parity.cases import Case
from tests.parity.checking import check_case
from tests.parity.faults import outcomes_of_faults
from tests.parity.padding_faults import FAULTS
from tests.parity.ranks import run_case
from tests.parity.tiers import in_parts, one_of, selected

ALONE = Case(moe="capacity, choice", layers=2, masked=0.3, pad=True)
DATA = replace(ALONE, dp=2, ep=2)
TENSOR = Case(
    tp=2, sequence_parallel=True, ep=2, moe="step", model="llama", layers=2, m=3, pad=True
)
CONTEXT = Case(cp=2, etp=2, moe="capacity, score", activations="full", layers=2, pad=True)
SPLIT = Case(pp=2, dp=2, ep=2, moe="random", schedule="zb_h1", m=3, zero=2, pad=True)
SLICED = Case(pp=2, in_process=True, moe="sliced", schedule="seq1f1b", slices=2, m=3, pad=True)
FOLDED = Case(
    dp=2, tp=2, sequence_parallel=True, ep=4, moe="pyramid, biased", layers=3, masked=0.3, pad=True
)
BOTH = replace(FOLDED, ep=2, etp=2, moe="capacity, choice", zero=3)
LONG = Case(
    cp=2, tp=2, sequence_parallel=True, ep=2, moe="random", activations="experts again", pad=True
)
GATHERED = {"dispatch": "all_gather"}
FETCHED = {"dispatch": "fetch"}
TWO_HOPS: dict[str, Any] = {"dispatch": "hierarchical", "node": 2}
GROUPS = [
    [DATA, replace(DATA, **GATHERED), replace(DATA, activations="experts again")],
    [TENSOR, replace(TENSOR, **GATHERED, activations="stage")],
    [CONTEXT, replace(CONTEXT, **GATHERED, activations="keep")],
    [SPLIT, replace(SPLIT, **GATHERED)],
    [FOLDED, replace(FOLDED, **GATHERED), replace(FOLDED, **TWO_HOPS)],
    [BOTH, replace(BOTH, **GATHERED), replace(BOTH, **TWO_HOPS)],
    [LONG, replace(LONG, **GATHERED, activations="keep")],
]
"""Groups of a case and other forms of it that have the same bits: rows of an expert are in the
order of ranks, sequences and positions."""
OTHERS = [
    replace(ALONE, moe="capacity, position", model="gemma", activations="full", m=3),
    replace(SLICED, dp=2, ep=2, expert_chunks=2, schedule="terapipe"),
    replace(BOTH, masked=1.0, clip=None),
]
"""Cases that the parity matrix does not have."""


def of_world(world: int) -> list[list[Case]]:
    groups = [*GROUPS, *([case] for case in OTHERS)]
    return [group for group in groups if group[0].world == world]


def test_empty_rows_change_nothing() -> None:
    check_groups(of_world(2)[:1])


@one_of(4)
def test_empty_rows_change_nothing_in_more_layouts(some: slice) -> None:
    for world in (1, 2, 4):
        if groups := of_world(world)[some]:
            check_groups(groups)


def counted(world: World, case: Case) -> int:
    count = mock.Mock(side_effect=count_rows)
    make = dispatchers.make_dispatcher

    def counting(*given: Any) -> Dispatcher:
        return replace(make(*given), count=count)

    with mock.patch.object(sharding, "make_dispatcher", counting):
        run_case(world, case, validate=True)
    return count.call_count


@pytest.mark.parametrize(
    "form",
    [
        pytest.param({}, id="rows", marks=pytest.mark.full),
        pytest.param(FETCHED, id="fetch", marks=pytest.mark.slow),
    ],
)
def test_nobody_counts(form: dict[str, str]) -> None:
    padded = replace(DATA, **form)
    assert run_world(2, counted, padded) == [0, 0]
    assert min(run_world(2, counted, replace(padded, pad=False))) > 0


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@in_parts("fault", FAULTS, full=2, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match="difference is"):
        check_case(FAULTS[fault], outcomes[fault.__name__])
