"""The checks on the device find every fault that is seeded in the package."""

from __future__ import annotations

import re
import traceback
from typing import Any

import numpy as np

from megapipe.testing import WorldError
from tests.fake_cuda.faults import FAULTS, Fault
from tests.fake_cuda.world import faults_of, observe, run_world
from tests.parity.ranks import Case, run_case
from tests.parity.tiers import in_parts, one_of


def run_with(world: Any, number: int) -> str:
    """Run the case with the fault; return its traceback, or whether values are NaN."""
    fault = FAULTS[number]
    with fault.patch():
        try:
            outcome = run_case(world, fault.case, validate=False)
        except Exception:
            return traceback.format_exc()
    parts = [x for kinds in outcome.values for each in kinds.values() for x in each]
    return "" if all(np.isfinite(values).all() for *_, values in parts) else "some state is nan"


@in_parts("number", range(len(FAULTS)), full=3, ids=lambda number: FAULTS[number].name)
def test_a_fault_is_noticed(number: int) -> None:
    fault: Fault = FAULTS[number]
    try:
        patience = {"timeout_s": 60.0, "group_timeout_s": fault.patience_s}
        texts, reports = observe(fault.case.world, run_with, number, **patience)
        found = "\n".join([*texts, *faults_of(reports)])
    except WorldError as error:
        found = str(error)
    assert re.search(fault.noticed, found), found


def without(world: Any, case: Case) -> None:
    run_case(world, case, validate=False)


@one_of(3)
def test_the_cases_have_no_faults(some: slice) -> None:
    for case in [*dict.fromkeys(fault.case for fault in FAULTS)][some]:
        run_world(case.world, without, case)
