"""Experts over dp, cp and tp, one of these axes or all at once: over neighbours, whichever axis
they are along."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.parity.bitwise import check_groups
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
"""Case of two experts on each of eight ranks."""
PARTS = replace(WHOLE, ep=4, etp=2)
"""Case of four on each pair of tp ranks, half of each expert on either."""
COPIES = replace(PARTS, ep=2, model="llama", zero=3)
"""Case of eight on four ranks of a replica, and the same on those of the other."""


@pytest.mark.full
def test_experts_fold_over_all_axes_at_once() -> None:
    """Cases include halves of experts under ZeRO-3 (DeepSpeed-MoE)."""
    check_groups([[WHOLE], [PARTS], [COPIES]])


def over_three() -> list[Case]:
    """Return a case of each setting whose experts three ranks can share; the parity matrix has no
    three."""
    cases = []
    for name, section in MOE.items():
        experts = section["num_experts"]
        numbers = experts if isinstance(experts, list) else [experts]
        if all(number % 3 == 0 for number in numbers):
            cases.append(Case(moe=name, layers=4, masked=0.3, m=3, dp=3, ep=3, vocab=301, batch=1))
    return cases


@pytest.mark.full
def test_settings_over_three_ranks_are_those_of_one_process() -> None:
    check_groups([[case] for case in over_three()])
