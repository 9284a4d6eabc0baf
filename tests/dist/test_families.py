"""Every family, split over ranks, computes what transformers' class computes in one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest

from megapipe.distributed.mesh import Grid
from megapipe.layers.parameter import LocalParameter
from megapipe.testing import World, run_world
from megapipe.train.step import TrainStep
from tests.parity import cases, reference
from tests.parity.outcome import Parts, own_grads
from tests.parity.ranks import Case, Rows, assemble, batch_of, configure, take_region
from tests.unit.model.transformers_models import FAMILIES, hf_logits_and_grads, model_of

ALONE = ("llama_linear", "llama_yarn", "llama_yarn_factor", "neox_in_turn", "bloom")
"""They differ from others in what ranks do not share."""
SPLIT = [family for family in FAMILIES if family not in ALONE]
LAYOUTS = (Case(tp=4), Case(tp=2, pp=2, sequence_parallel=True))


def case_of(layout: Case, family: str) -> Case:
    model = model_of(family)
    assert model.vocab_size is not None
    fields = {"model": family, "layers": model.layers, "vocab": model.vocab_size}
    return Case(**{**vars(layout), **fields})


def as_cases() -> Any:
    """Cases may have the families' models: every field of them, in the place of a case's own."""
    models = {family: model_of(family).model_dump() for family in SPLIT}
    return mock.patch.dict(cases.MODELS, models)


def fill(params: reference.Params, spec: LocalParameter, out: Any) -> None:
    take_region(params[spec.name], spec, out)


def first_gradients(world: World, layout: Case) -> list[Parts]:
    """What this rank has of the first step's, by family."""
    mesh = world.mesh(Grid(tp=layout.tp, pp=layout.pp))
    found: list[Parts] = []
    with as_cases():
        for family in SPLIT:
            case = case_of(layout, family)
            config, resolved = configure(case)
            params = reference.init_random(config.model, seed=3)
            step = TrainStep(config, resolved, mesh, initial=functools.partial(fill, params))
            finish = step.optimizer.finish_reduce

            def spy(scale: float = 1.0, step: TrainStep = step, finish: Any = finish) -> Any:
                squares = finish(scale)
                found.append(list(own_grads(step.optimizer)))
                return squares

            step.optimizer.finish_reduce = spy  # type: ignore[method-assign]
            step.train(0, Rows(case))
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_gradients_equal_transformers(layout: Case) -> None:
    results = run_world(4, first_gradients, layout)
    with as_cases():
        for i, family in enumerate(SPLIT):
            case = case_of(layout, family)
            model = configure(case)[0].model
            params = reference.init_random(model, seed=3)
            _, wanted = hf_logits_and_grads(params, model, batch_of(case, 0))
            found = assemble([own[i] for own in results], params)
            reference.assert_grads_close(found, wanted, 1e-9)
