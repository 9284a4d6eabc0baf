"""Seeded mistakes in training without a flush: the comparison with the definitions sees each."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
from torch import Tensor

from megapipe.layers.parameter import spec_of
from megapipe.testing import World, run_world
from megapipe.train.anomaly_detection import BadStep
from tests.parity import async_faults
from tests.parity.async_ranks import StaleOutcome, begun, check_stale, run_stale, same_parts
from tests.parity.cases import Case, Rows
from tests.parity.outcome import Parts, own_values
from tests.parity.tiers import in_parts, selected

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
CORRECT = replace(STASH, weights="correct", lr_anneal_steps=5)
IN_TURNS = replace(STASH, schedule="1f1b_rr", replicas=(2, 1), m=2, layers=2)
CASES = {
    "stash": STASH,
    "vertical": replace(STASH, weights="vertical"),
    "predict": replace(STASH, weights="predict"),
    "look-ahead": replace(STASH, pp=2, m=2, look_ahead=1),
    "correct": CORRECT,
    "at first synchronous": replace(CORRECT, synchronous_steps=3),
    "double_buffer": replace(STASH, weights="double_buffer", clip_scope="global", m=2),
    "tied": replace(
        STASH,
        weights="double_buffer",
        clip_scope="global",
        pp=2,
        m=2,
        layers=2,
        tied=True,
        in_process=False,
    ),
    "in turns": replace(IN_TURNS, in_process=False),
    "in turns, in one process": IN_TURNS,
}
FAULTS = {
    "stash": async_faults.STASH,
    "vertical": async_faults.VERTICAL,
    "predict": async_faults.PREDICT,
    "look-ahead": async_faults.LOOK_AHEAD,
    "correct": async_faults.CORRECT,
    "at first synchronous": async_faults.SYNCHRONOUS_AT_FIRST,
    "double_buffer": async_faults.DOUBLE_BUFFER,
    "tied": async_faults.TIED,
    "in turns": async_faults.IN_TURNS,
    "in turns, in one process": async_faults.IN_ONE_PROCESS,
}
PAUSES = {"look-ahead": range(STASH.steps)}
"""Steps with a validation, by case."""
ALL = {
    f"{name}-{fault.__name__}": (name, fault.__name__)
    for name, faults in FAULTS.items()
    for fault in faults
}
Found = dict[tuple[str, str], StaleOutcome | str]
"""Results of a rank by case and fault: an outcome, or the error that the fault leads to."""


def with_faults(world: World, wanted: Sequence[tuple[str, str]]) -> Found:
    """Run each case with its fault, or without one if the fault has no name."""
    found: Found = {}
    for case, name in wanted:
        with getattr(async_faults, name)() if name else nullcontext():
            try:
                found[case, name] = run_stale(world, CASES[case], PAUSES.get(case, ()))
            except Exception as error:
                found[case, name] = repr(error)
    return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> list[Found]:
    """Return the results of each rank."""
    wanted = [*selected(request, "fault", ALL).values()]
    wanted += [(name, "") for name in selected(request, "name", CASES)]
    found: list[Found] = [{}, {}, {}]
    for size in {CASES[name].world for name, _ in wanted}:
        mine = [each for each in wanted if CASES[each[0]].world == size]
        for rank, of_rank in enumerate(run_world(size, with_faults, mine, timeout_s=240)):
            found[rank] |= of_rank
    return found


def seen(name: str, fault: str, ranks: Sequence[Found]) -> list[StaleOutcome | str]:
    return [of_rank[name, fault] for of_rank in ranks[: CASES[name].world]]


@in_parts("name", CASES, default=["stash", "tied"], full=3)
def test_without_a_fault_nothing_is_noticed(name: str, outcomes: list[Found]) -> None:
    found = [each for each in seen(name, "", outcomes) if isinstance(each, StaleOutcome)]
    assert len(found) == CASES[name].world
    check_stale(CASES[name], found)


@in_parts("fault", ALL, default=13, full=3)
def test_a_fault_is_noticed(fault: str, outcomes: list[Found]) -> None:
    name, seeded = ALL[fault]
    found = seen(name, seeded, outcomes)
    said = async_faults.LEADS_TO.get(getattr(async_faults, seeded))
    if said is not None:
        assert all(isinstance(each, str) and re.search(said, each) for each in found), found
        return
    runs = [each for each in found if isinstance(each, StaleOutcome)]
    assert len(runs) == CASES[name].world, f"an error, not a difference: {found}"
    with pytest.raises(AssertionError, match=r": .+, |: off by |: expected "):
        check_stale(CASES[name], runs)


def with_a_gradient_that_is_not_finite(world: World, case: Case, stage: int) -> None:
    """Check that a bad gradient of a stage in window 3 keeps that window's update from being
    made."""
    step, rows = begun(world, case), Rows(case)
    finish, through = step.optimizer.finish_stage, Counter[int]()

    def poisoned(index: int) -> Tensor:
        through[index] += 1
        if (index, through[index]) == (stage, 4):
            step.optimizer.shards_of(index)[0].bucket.grads[0][0] = math.inf
        return finish(index)

    step.optimizer.finish_stage = poisoned  # type: ignore[method-assign]
    names = {spec_of(each).name for each in step.modules[stage].parameters()}

    def masters() -> dict[str, Parts]:
        parts = own_values(step.optimizer)["model"]
        return {"model": [part for part in parts if part[0] in names]}

    late = case.weights == "double_buffer"
    for i in range(3 + late):
        step.train(i, rows)
    before = masters()
    said = f"gradients of stage {stage} are not finite"
    if late:
        said = rf".*\(gradients of stages {stage}\): not finite"
    with pytest.raises(BadStep, match=f"step 4: {said}"):
        step.train(3 + late, rows)
    assert before["model"]
    same_parts(before, masters())


@pytest.mark.parametrize("name", ["stash", "double_buffer"])
@pytest.mark.parametrize("stage", [0, 2])
def test_what_is_not_finite_ends_the_run_before_its_update(name: str, stage: int) -> None:
    run_world(1, with_a_gradient_that_is_not_finite, CASES[name], stage)
