"""Training without a flush by every switch computes what the definitions say."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from megapipe.errors import ConfigError
from tests.parity.async_matrix import DIMENSIONS, JOINT, to_case
from tests.parity.case_file import drawn, read
from tests.parity.cases import SWITCHES, Case, configure
from tests.parity.pair_runs import MATRICES, case_of, check_pairs, choice_of, impossible_pairs

WORLDS = (1, 2, 3, 4, 6, 8)


@pytest.mark.full
@pytest.mark.parametrize("world", WORLDS)
def test_drawn_pairs(world: int, chosen: list[str]) -> None:
    """Some of the cases that between them hold every pair of values, others for each commit."""
    cases = [case for case in read("stale")[0] if case.id in chosen] or drawn("stale")
    here = [case for case in cases if case_of("stale", case).world == world]
    if not here:
        pytest.skip(f"none of the cases has {world} ranks")
    check_pairs("stale", here)


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS)
def test_pairs(world: int) -> None:
    cases = [case for case in read("stale")[0] if case_of("stale", case).world == world]
    check_pairs("stale", cases)


def test_the_file_of_cases_holds_every_pair() -> None:
    pairs, (cases, _) = MATRICES["stale"].pairs, read("stale")
    choices = [choice_of("stale", case) for case in cases]
    pairs.check_held(choices, impossible_pairs("stale"))
    assert {case_of("stale", case).world for case in cases} == {*WORLDS}


HERE = {field for dimension in DIMENSIONS for field in JOINT.get(dimension, [dimension])}
OTHERS = [
    name
    for name, about in SWITCHES.items()
    if about.key and not about.elsewhere and name not in HERE
]
"""Fields that the parity matrix varies by keys, and this one does not."""


@functools.cache
def changes() -> list[dict[str, Any]]:
    """Return, for each case of the parity matrix, the fields that differ from the defaults."""
    plain, cases = Case(), [case_of("parity", case) for case in read("parity")[0]]
    ours = [{name: getattr(case, name) for name in OTHERS} for case in cases]
    return [{name: v for name, v in of.items() if v != getattr(plain, name)} for of in ours]


@pytest.mark.parametrize("field", OTHERS)
def test_what_is_no_dimension_here_is_refused_without_a_flush(field: str) -> None:
    """With as few other such values as there are in a case of the parity matrix."""
    without_flush = to_case(MATRICES["stale"].pairs.plain)
    configure(without_flush)
    one_chunk = {1} if field == "chunks" else set()
    values = {of[field] for of in changes() if field in of} - one_chunk
    for value in values:
        fewest = min((of for of in changes() if of.get(field) == value), key=len)
        with pytest.raises(ConfigError):
            configure(replace(without_flush, **fewest))
    assert values
