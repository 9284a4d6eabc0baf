"""A step by schedules whose placement is a V, on one to four processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.schedule.generators import gpipe_on
from megapipe.schedule.placement import vee
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.crossed import crossed
from tests.parity.ranks import Case, Outcome, check_case, configure, take_region, train

V_CASE = Case(pp=2, chunks=2, m=3, schedule="gpipe", masked=0.3, debug=True)
"""On the V both ends of the model are on rank 0, so a tied embedding is tied within it."""


def run_v(world: World, cases: Sequence[Case], schedules: Sequence[str]) -> list[Outcome]:
    outcomes = []
    for case, name in zip(cases, schedules, strict=True):
        config, layout = configure(case)
        schedule = crossed() if name == "crossed" else gpipe_on(vee(2), case.m)
        grid = Grid(pp=1 if case.in_process else case.pp, dp=case.dp, tp=case.tp)
        step = TrainStep(config, layout, world.mesh(grid), schedule=schedule)
        params = reference.init_random(config.model, seed=3)
        step.optimizer.set_weights(
            lambda spec, out, params=params: take_region(params[spec.name], spec, out)
        )
        outcomes.append(train(step, case, validate=True))
    return outcomes


@pytest.mark.parametrize(
    ("cases", "schedules"),
    [
        (
            [V_CASE, replace(V_CASE, tied=False, debug=False), V_CASE],
            ["gpipe", "gpipe", "crossed"],
        ),
        (
            [replace(V_CASE, dp=2), replace(V_CASE, tp=2, sequence_parallel=True, zero=0)],
            ["gpipe", "crossed"],
        ),
        (
            [replace(V_CASE, in_process=True), replace(V_CASE, in_process=True, tied=False)],
            ["crossed", "gpipe"],
        ),
    ],
    ids=["two ranks", "four ranks", "in process"],
)
def test_a_v_gives_the_reference_s_numbers(cases: list[Case], schedules: list[str]) -> None:
    """Loss, gradients, norm, weights, and forward_only in the validation."""
    results = run_world(cases[0].world, run_v, cases, schedules)
    for i, case in enumerate(cases):
        check_case(case, [outcomes[i] for outcomes in results])
