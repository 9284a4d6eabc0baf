"""Seeded mistakes in training without a flush: the comparison with the definitions sees each."""

from __future__ import annotations

import pytest

from megapipe.testing import World, run_world
from tests.parity import stale_faults
from tests.parity.cases import Case
from tests.parity.stale_ranks import StaleOutcome, check_stale, run_stale

STASH = Case(
    weights="stash",
    clip_scope="stage",
    pp=3,
    m=1,
    layers=3,
    uneven=True,
    tied=False,
    steps=7,
    batch=1,
    in_process=True,
)
CASES = {
    "stash": STASH,
    "vertical": Case(**{**vars(STASH), "weights": "vertical"}),
    "double_buffer": Case(
        **{**vars(STASH), "weights": "double_buffer", "clip_scope": "global", "m": 2}
    ),
}
FAULTS = [
    (weights, fault.__name__)
    for weights, faults in (
        ("stash", stale_faults.STASH),
        ("vertical", stale_faults.VERTICAL),
        ("double_buffer", stale_faults.DOUBLE_BUFFER),
    )
    for fault in faults
]


def with_all_faults(world: World) -> dict[tuple[str, str], StaleOutcome | str]:
    """What comes of each fault: an outcome, or an error that it leads to."""
    found: dict[tuple[str, str], StaleOutcome | str] = {}
    for weights, name in FAULTS:
        with getattr(stale_faults, name)():
            try:
                found[weights, name] = run_stale(world, CASES[weights])
            except Exception as error:
                found[weights, name] = repr(error)
    for weights, case in CASES.items():
        found[weights, ""] = run_stale(world, case)
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], StaleOutcome | str]:
    (found,) = run_world(1, with_all_faults, timeout_s=240)
    result: dict[tuple[str, str], StaleOutcome | str] = found
    return result


@pytest.mark.parametrize("weights", CASES)
def test_without_a_fault_nothing_is_noticed(
    weights: str, outcomes: dict[tuple[str, str], StaleOutcome | str]
) -> None:
    outcome = outcomes[weights, ""]
    assert isinstance(outcome, StaleOutcome), outcome
    check_stale(CASES[weights], [outcome])


@pytest.mark.parametrize(("weights", "name"), FAULTS)
def test_a_fault_is_noticed(
    weights: str, name: str, outcomes: dict[tuple[str, str], StaleOutcome | str]
) -> None:
    outcome = outcomes[weights, name]
    if isinstance(outcome, StaleOutcome):
        with pytest.raises(AssertionError):
            check_stale(CASES[weights], [outcome])
