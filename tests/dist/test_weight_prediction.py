"""Weights ahead of their masters: against plain formulas, in validation, saved and resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megapipe import TrainStep
from megapipe.distributed.mesh import ParallelMesh
from megapipe.optim.optimizer import Optimizer
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.cases import END, validation_rows, validation_samples
from tests.parity.checking import assert_same_bits, check_loss, values_at
from tests.parity.expected import validation
from tests.parity.outcome import Outcome
from tests.parity.ranks import (
    Case,
    Rows,
    check_case,
    configure,
    local_copies,
    own_values,
    run_case,
    run_cases,
    take_region,
)
from tests.parity.tiers import in_parts

PARALLEL = Case(dp=2, pp=2, m=2, look_ahead=2, steps=3)
ALONE = Case(layers=2, look_ahead=1, steps=3)
CASES = [
    PARALLEL,
    replace(PARALLEL, zero=0, rule="sgd", tied=False),
    replace(PARALLEL, zero=2, rule="adabelief", dtype="fp32"),
    replace(PARALLEL, zero=3, rule="nadamw", schedule="interleaved_1f1b", chunks=2),
    replace(PARALLEL, rule="lion", dtype="bf16", lora="some"),
    *(replace(ALONE, rule=rule) for rule in ("adam", "rmsprop", "nadamw", "adabelief", "adam3")),
]


@in_parts("world", [1, 4], default=[1], full=[4])
def test_gradients_are_those_of_weights_that_plain_formulas_predict(world: int) -> None:
    cases = [case for case in CASES if case.world == world]
    ranks = run_world(world, run_cases, cases, timeout_s=30 + 10 * len(cases))
    for i, case in enumerate(cases):
        try:
            check_case(case, [outcomes[i] for outcomes in ranks])
        except AssertionError as error:
            raise AssertionError(f"{case.name}: {error}") from None


def ahead_by_none(world: World, case: Case) -> tuple[Outcome, Outcome]:
    """Run a case where each weight is its master after all, and where there are no master
    weights."""
    publish = Optimizer._predict_and_gather
    with mock.patch.object(
        Optimizer, "_predict_and_gather", lambda self, times=1: publish(self, 0)
    ):
        found = run_case(world, case)
    return found, run_case(world, replace(case, look_ahead=0))


def test_masters_of_their_own_change_no_bit() -> None:
    for found, plain in run_world(4, ahead_by_none, replace(PARALLEL, dtype="fp32")):
        assert_same_bits(found, plain, "look_ahead")


def begin(case: Case, mesh: ParallelMesh) -> TrainStep:
    config, layout = configure(case)
    step = TrainStep(config, layout, mesh, document_end=END)
    params = reference.init_random(config.model, seed=3, lora=config.lora)
    step.optimizer.set_weights(lambda spec, out: take_region(params[spec.name], spec, out))
    return step


def stop_and_go(world: World, case: Case, folder: Path) -> tuple[Outcome, bool]:
    """Return losses of validations in the midst of a run, and whether that run, and one that
    resumes from what is saved there, are the undisturbed one."""
    rows, found = Rows(case), Outcome()
    mesh = world.mesh(case.grid)
    plain, watched = begin(case, mesh), begin(case, mesh)
    for i in range(2):
        plain.train(i, rows)
        watched.train(i, rows)
        watched.settle()
        found.losses.append(watched.evaluate(validation_rows(case), validation_samples(case)).loss)
        found.values.append(own_values(watched.optimizer))
    watched.save(folder, 2)
    resumed = begin(case, mesh)
    resumed.load(folder)
    ends = [after(step, rows) for step in (plain, watched, resumed)]
    return found, all(same(ends[0], end) for end in ends[1:])


def after(step: TrainStep, rows: Rows) -> list[Any]:
    """Return the weights before and after the third step, and its result."""
    step.settle()
    before = list(local_copies(step))
    results = step.train(2, rows)
    step.settle()
    return [*before, *local_copies(step), ("result", None, [r.loss for r in results])]


def same(one: list[Any], other: list[Any]) -> bool:
    return all(
        a[:2] == b[:2] and np.array_equal(a[2], b[2]) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(ALONE, id="alone"),
        pytest.param(PARALLEL, id="zero 1", marks=pytest.mark.slow),
        pytest.param(
            replace(PARALLEL, zero=3, dtype="fp32"), id="zero 3, fp32", marks=pytest.mark.full
        ),
    ],
)
def test_validation_and_checkpoints_have_the_masters(case: Case, tmp_path: Path) -> None:
    ranks = run_world(case.world, stop_and_go, case, tmp_path)
    outcomes = [found for found, _ in ranks]
    for i in range(2):
        masters = values_at(case, outcomes, i)["model"]
        check_loss("validation loss", [o.losses[i] for o in outcomes], validation(case, masters))
    assert all(equal for _, equal in ranks)
