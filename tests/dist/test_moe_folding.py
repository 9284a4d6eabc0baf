"""Experts over dp, cp and tp, one of these axes or all at once: over neighbours, whichever axis
they are along."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.parity.bitwise import check_groups
from tests.parity.marks import in_parts, one_of
from tests.parity.named_settings import MOE
from tests.parity.ranks import Case

WHOLE = Case(
    dp=2,
    cp=2,
    tp=2,
    sequence_parallel=True,
    ep=8,
    moe="sixteen",
    masked=0.3,
    layers=2,
    batch=1,
)
"""Two experts on each of eight ranks."""
PARTS = replace(WHOLE, ep=4, etp=2)
"""Four on each pair of tp ranks, half of each expert on either."""
COPIES = replace(PARTS, ep=2, model="llama", zero=3)
"""Eight on four ranks of a replica, and the same on those of the other."""


@pytest.mark.full
def test_experts_fold_over_all_axes_at_once() -> None:
    """Row 7.09 (DeepSpeed-MoE): among them halves of experts under ZeRO-3."""
    check_groups([[WHOLE], [PARTS], [COPIES]])


FOLDS: dict[str, dict[str, Any]] = {
    "over dp": {"dp": 2, "ep": 2, "zero": 2},
    "over three": {"dp": 3, "ep": 3, "vocab": 301, "batch": 1},
    "over cp": {"cp": 2, "ep": 2, "model": "llama"},
    "over tp": {"tp": 2, "sequence_parallel": True, "ep": 2, "schedule": "zb_h1"},
    "of half the width": {"dp": 2, "etp": 2, "model": "llama", "activations": "full"},
}


def of_fold(fold: dict[str, Any]) -> list[Case]:
    """Each setting whose experts can be shared out so."""
    cases = []
    for name, section in MOE.items():
        experts = section["experts"]
        numbers = experts if isinstance(experts, list) else [experts]
        if all(number % fold.get("ep", 1) == 0 for number in numbers):
            cases.append(Case(moe=name, layers=4, masked=0.3, m=3, **fold))
    return cases


def test_every_setting_is_over_an_axis_and_in_halves() -> None:
    for name in MOE:
        over = [key for key, fold in FOLDS.items() if name in [c.moe for c in of_fold(fold)]]
        assert "of half the width" in over, name
        assert len(over) > 1, f"no axis has a size for {name}"


@in_parts("fold", FOLDS, full=2)
@one_of(12)
def test_every_setting_is_that_of_one_process(fold: str, some: slice) -> None:
    """CI has other settings over each axis."""
    first = [*FOLDS].index(fold) if some.step else 0
    check_groups([[case] for case in of_fold(FOLDS[fold])][first:][some])
