"""Any number of ranks: every schedule starts and trains; three of each axis."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from torch import Tensor

from megapipe import TrainStep
from megapipe.distributed.mesh import Grid
from megapipe.layers.parameter import LocalParameter
from megapipe.schedule.generators import gpipe_on, names
from megapipe.schedule.ir import Schedule
from megapipe.schedule.placement import Placement
from megapipe.testing import World, run_world
from tests.parity import reference
from tests.parity.outcome import take_region
from tests.parity.ranks import Case, Rows, batch_of, check_case, configure, plain, run_cases
from tests.parity.registry_cases import smallest
from tests.parity.tiers import in_parts


def fill(params: reference.Params, spec: LocalParameter, out: Tensor) -> None:
    take_region(params[spec.name], spec, out)


def first_steps(world: World, cases: list[Case]) -> list[tuple[float, float]]:
    """Return loss and gradient norm of one step of each case, over the groups of one mesh."""
    mesh = world.mesh(Grid(pp=world.size))
    seen = []
    for case in cases:
        config, layout = configure(case)
        params = reference.init_random(config.model, seed=3)
        try:
            step = TrainStep(config, layout, mesh, initial=functools.partial(fill, params))
            (result,) = step.train(0, Rows(case))
        except Exception as error:
            error.add_note(f"case: {case.name}")
            raise
        seen.append((result.loss, result.grad_norm))
    return seen


@in_parts("pp", [1, 2, 3, 4, 5, 6, 7, 8], default=[3], full=[2])
def test_every_schedule_starts_and_trains(pp: int) -> None:
    cases = [case for name in names() for case in smallest(name, pp)]
    assert len(cases) >= 24
    cases = [replace(case, tied=i % 2 == 0) for i, case in enumerate(cases)]
    results = run_world(pp, first_steps, cases)
    for i, case in enumerate(cases):
        known = loss_and_norm(plain(case))
        for seen in results:
            assert seen[i] == pytest.approx(known, rel=1e-10), case.name


@functools.cache
def loss_and_norm(case: Case) -> tuple[float, float]:
    """Return the plain reference's loss and gradient norm before the first step."""
    model = configure(case)[0].model
    params = reference.init_random(model, seed=3)
    loss, grads = reference.loss_and_grads(params, model, batch_of(case, 0))
    return loss, sum(grad.square().sum().item() for grad in grads.values()) ** 0.5


def unequal_replicas(ranks: int, microbatches: int) -> Schedule:
    """Make a placement on three ranks: two hold the first stage and the third the last one of
    both."""
    placement = Placement(ranks, ((0, 2), (1, 2)))
    return gpipe_on(placement, microbatches, direction=tuple(i % 2 for i in range(microbatches)))


THREE_HEADS = {"heads": 6, "sequence": 9}
CASES = {
    3: [
        *(Case(dp=3, zero=zero) for zero in range(4)),
        *(Case(tp=3, sequence_parallel=sp, model="mixed", **THREE_HEADS) for sp in (False, True)),
        Case(pp=3, m=3, schedule=f"{__name__}:unequal_replicas"),
    ],
    6: [
        Case(dp=3, pp=2, schedule="chimera", masked=0.3),
        Case(dp=3, pp=2, schedule="zb_v", zero=3, prefetch=0),
        Case(tp=3, pp=2, schedule="zb_h1", sequence_parallel=True, **THREE_HEADS),
    ],
}


@pytest.mark.full
@pytest.mark.parametrize("world", CASES)
def test_three_of_each_axis(world: int) -> None:
    results = run_world(world, run_cases, CASES[world])
    for i, case in enumerate(CASES[world]):
        check_case(case, [outcomes[i] for outcomes in results])


@pytest.mark.full
def test_copies_of_a_tied_embedding_have_one_trust_ratio() -> None:
    """Terms of four ranks are added in one order, wherever they are in the vector that is sent."""
    case = Case(
        tp=4,
        pp=2,
        m=7,
        schedule="zb_h1",
        scatter="on",
        shard_size=1,
        rule="lamb",
        activations="of each some",
        model="gemma",
        uneven=True,
        clip=None,
        layers=3,
        batch=1,
        steps=3,
    )
    check_case(case, [of_rank[0] for of_rank in run_world(8, run_cases, [case])])
