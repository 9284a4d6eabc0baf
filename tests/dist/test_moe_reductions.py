"""Gradients of experts, and of other weights beside them, that are reduced in a narrow type."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.testing import World, run_world
from tests.parity.bitwise import check_groups
from tests.parity.faults import run_with
from tests.parity.ranks import Case, Outcome, check_case
from tests.parity.switch_faults import (
    gradients_added_up_as_they_travel,
    gradients_travel_as_they_are,
)

EXPERTS = Case(
    tp=2,
    sequence_parallel=True,
    moe="top 2",
    layers=2,
    masked=0.3,
    batch=1,
    reduce_dtype="bf16",
)
"""Only experts have replicas."""
OTHERS = replace(EXPERTS, tp=1, dp=2, ep=2)
"""Only experts have no replicas."""
MORE = [
    [
        replace(OTHERS, ep=1, moe="groups", layers=3),
        replace(OTHERS, ep=1, dp=1, cp=2, moe="capacity, position", dtype="fp32", zero=0),
    ],
    [
        replace(EXPERTS, dp=2, ep=2, zero=2),
        replace(EXPERTS, dp=2, etp=2, moe="pyramid", zero=3, shard_size=2, dtype="bf16"),
    ],
]


def test_gradients_are_as_far_off_as_those_of_dense_layers() -> None:
    check_groups([[EXPERTS], [OTHERS]])


@pytest.mark.slow
@pytest.mark.parametrize("cases", MORE, ids=lambda cases: cases[0].world)
def test_in_more_layouts(cases: list[Case]) -> None:
    check_groups([[case] for case in cases])


FAULTS = {
    gradients_travel_as_they_are: "no gradient of experts has travelled in bf16",
    gradients_added_up_as_they_travel: r"gradient layers.\d.moe.*difference is",
}


def run_faults(world: World) -> list[Outcome | str]:
    return [run_with(world, fault, EXPERTS) for fault in FAULTS]


@pytest.mark.full
def test_parity_notices() -> None:
    results = run_world(2, run_faults)
    for message, outcomes in zip(FAULTS.values(), zip(*results, strict=True), strict=True):
        with pytest.raises(AssertionError, match=message):
            check_case(EXPERTS, outcomes)
