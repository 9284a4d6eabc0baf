"""Every registered schedule trains: loss, every gradient, norm and weights of a single process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.schedule.generators import names
from megapipe.schedule.proof.validate import validate
from tests.parity import registry_cases
from tests.parity.bitwise import assert_bitwise, outcomes_of
from tests.parity.pair_runs import check_cases
from tests.parity.ranks import Case
from tests.parity.tiers import in_parts

pytestmark = pytest.mark.full


@in_parts("name", names(), full=["seq1f1b", "zb_h1"])
def test_trains(name: str) -> None:
    """For slow schedules, too, test_odd_sizes compares first steps with one process."""
    check_cases(registry_cases.of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_trains_with_many_micro_batches(name: str) -> None:
    check_cases(registry_cases.of(name, registry_cases.many_microbatches))


@in_parts("name", names(), full=12)
def test_trains_with_split_positions(name: str) -> None:
    """Slices of sequences, which rings and Ulysses attend to, and whole ones."""
    of = [replace(each, cp=2, sequence=32, model="llama") for each in registry_cases.settings(name)]
    cases = [case for case in of if case.pp == 2]
    check_cases([replace(case, context=("ring", "ulysses")[i % 2]) for i, case in enumerate(cases)])


OF_SLICES = ["ring", "contiguous", "all_gather", "queries travel", "ulysses"]
OF_TWO = [*OF_SLICES, "striped", "helpers"]
"""Ways for two ranks to attend; schedules take turns with them."""


@in_parts("name", names(), full=12)
def test_swaps_bitwise_with_split_positions(name: str) -> None:
    case = next(case for case in registry_cases.settings(name) if case.pp == 2)
    contexts = OF_SLICES if registry_cases.schedule_of(case).slices > 1 else OF_TWO
    context = contexts[names().index(name) % len(contexts)]
    case = replace(case, cp=2, context=context, dtype="fp32", masked=0.3, sequence=32)
    case = replace(case, m=case.m + case.m % 2 + 2)
    assert_bitwise(*outcomes_of([case, replace(case, swap=True)]))


@in_parts("name", names(), full=8)
def test_swaps_bitwise(name: str) -> None:
    """Gradients come in micro-batch order, so gpipe of the same pieces on the same placement
    gives the same bits (fp32, dp 2, the clip active)."""
    case = next(case for case in registry_cases.settings(name) if case.pp == 2)
    case = replace(case, dp=2, dtype="fp32", masked=0.3, m=case.m + case.m % 2 + 4)
    assert validate(registry_cases.schedule_of(case)).bitwise_order
    ours, plain = outcomes_of([case, replace(case, swap=True)])
    assert case.clip is not None
    assert min(plain[0].norms) > case.clip, "the clip is not active"
    assert_bitwise(ours, plain)


def test_replicated_stages_train() -> None:
    """Stages of one rank, two and three, tied and not, with data-parallel copies and without."""
    base = Case(schedule="1f1b_rr", masked=0.3)
    check_cases(
        [
            replace(base, pp=3, m=4, replicas=(2, 1)),
            replace(base, pp=3, m=4, replicas=(1, 2), tied=False, debug=True),
            replace(base, pp=4, m=4, replicas=(2, 1, 1)),
            replace(base, pp=4, m=3, replicas=(3, 1), tied=False),
            replace(base, pp=3, m=2, replicas=(2, 1), dp=2, tied=False, zero=2),
            replace(base, pp=3, m=2, replicas=(1, 2), dp=2),
        ]
    )


def test_replicated_stages_swap_bitwise() -> None:
    case = Case(schedule="1f1b_rr", pp=3, m=6, replicas=(2, 1), dtype="fp32", masked=0.3)
    assert_bitwise(*outcomes_of([case, replace(case, swap=True)]))
