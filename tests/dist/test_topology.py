"""An auxiliary loss weighted by bandwidths between ranks (TA-MoE): by that from each token's rank.

The reference knows which rank a sample is on, and the bandwidths from it, by its own rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.bitwise import assert_bitwise, check_groups, outcomes_of
from tests.parity.cases import Case
from tests.parity.checking import check_case
from tests.parity.faults import outcomes_of_faults
from tests.parity.tiers import one_of, selected
from tests.parity.topology_faults import FAULTS, SKEWED

NODES: dict[str, Any] = {"dp": 4, "ep": 4, "node": 2, "topology": (8.0, 3.0, 1.0)}
PIPELINE = replace(SKEWED, pp=2, m=3, layers=4)
CASES = [
    replace(SKEWED, m=3, zero=2),
    replace(SKEWED, moe="groups", model="llama", activations="full", layers=3),
    replace(SKEWED, moe="capacity, choice", zero=3, activations="stage"),
    replace(PIPELINE, in_process=True, schedule="seq1f1b", slices=2, moe="sliced"),
    replace(PIPELINE, schedule="zb_h1", moe="groups", zero=2),
    replace(PIPELINE, schedule="chimera", m=4, tied=False, moe="top 2", zero=0),
    replace(PIPELINE, schedule="chimera_backward_halving", m=4, in_process=True, dp=4),
    replace(SKEWED, **NODES, m=3),
    replace(SKEWED, **NODES, moe="pyramid", dispatch="hierarchical", model="llama"),
    replace(SKEWED, dp=4, moe="capacity, position", zero=2, dispatch="fetch"),
]


def of_world(world: int) -> list[Case]:
    return [case for case in CASES if case.world == world]


def test_the_term_goes_by_the_rank_of_each_token() -> None:
    """Bandwidths are those from the rank that has the token (TA-MoE)."""
    check_groups([[case] for case in of_world(2)[:2]])


@one_of(4)
def test_the_term_in_more_layouts(some: slice) -> None:
    for world in (2, 4):
        check_groups([[case] for case in of_world(world)[some]])


def test_uniform_bandwidths_are_the_standard_term_to_the_bit() -> None:
    """The standard term is the auxiliary loss without bandwidths (TA-MoE)."""
    plain = replace(SKEWED, topology=None)
    standard, uniform, skewed = outcomes_of([plain, replace(plain, topology=(3.0, 3.0)), SKEWED])
    assert_bitwise(uniform, standard)
    assert [o.routing for o in uniform] == [o.routing for o in standard]
    assert skewed[0].norms != standard[0].norms
    assert skewed[0].losses[0] == standard[0].losses[0], "the term is not in the loss that is told"


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return outcomes_of_faults(selected(request, "fault", FAULTS))


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_parity_notices(fault: Any, outcomes: dict[str, list[Any]]) -> None:
    with pytest.raises(AssertionError, match="difference is"):
        check_case(FAULTS[fault], outcomes[fault.__name__])
