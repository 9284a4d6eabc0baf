"""Every family, split over ranks, computes what transformers' class computes in one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megapipe import TrainStep
from megapipe.config.model import ModelConfig
from megapipe.distributed.mesh import Grid
from megapipe.layers.parameter import LocalParameter
from megapipe.testing import World, run_world
from tests.parity import named_settings, reference
from tests.parity.outcome import Parts, own_grads
from tests.parity.ranks import Case, Rows, assemble, batch_of, configure, take_region
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import CASES, FAMILIES, hf_logits_and_grads, model_of

LAYOUTS = (Case(tp=2), Case(tp=4), Case(pp=2), Case(tp=2, pp=2, sequence_parallel=True))


def families(layout: Case) -> list[str]:
    """Return the families that can be split over the tp ranks of a layout."""
    return [family for family in CASES | FAMILIES if layout.tp in shares(model_of(family))]


def shares(model: ModelConfig) -> list[int]:
    assert model.ffn_hidden is not None
    return [tp for tp in (1, 2, 4) if model.kv_heads % tp == model.ffn_hidden % tp == 0]


def case_of(layout: Case, family: str) -> Case:
    model = model_of(family)
    assert model.vocab_size is not None
    fields = {"model": family, "layers": model.layers, "vocab": model.vocab_size}
    return Case(**{**vars(layout), **fields})


def as_cases() -> Any:
    """Let cases have the families' models: every field of them, in place of a case's own."""
    models = {family: model_of(family).model_dump() for family in CASES | FAMILIES}
    return mock.patch.dict(named_settings.MODELS, models)


def fill(params: reference.Params, spec: LocalParameter, out: Any) -> None:
    take_region(params[spec.name], spec, out)


def first_steps(world: World, layout: Case) -> list[tuple[Tensor, Parts]]:
    """Return the logits of the first batch and this rank's part of its gradients, for each
    family."""
    mesh = world.mesh(Grid(tp=layout.tp, pp=layout.pp))
    found: list[tuple[Tensor, Parts]] = []
    with as_cases():
        for family in families(layout):
            case = case_of(layout, family)
            config, resolved = configure(case)
            params = reference.init_random(config.model, seed=3)
            step = TrainStep(config, resolved, mesh, initial=functools.partial(fill, params))
            logits, finish = step.logits(batch_of(case, 0)[0]), step.optimizer.finish_reduce
            grads: Parts = []

            def spy(
                scale: float = 1.0, step: TrainStep = step, finish: Any = finish, to: Any = grads
            ) -> Any:
                squares = finish(scale)
                to.extend(own_grads(step.optimizer))
                return squares

            step.optimizer.finish_reduce = spy  # type: ignore[method-assign]
            step.train(0, Rows(case))
            found.append((logits, grads))
    return found


@in_parts("layout", LAYOUTS, full=LAYOUTS[-1:], ids=lambda each: each.name)
def test_logits_and_gradients_equal_transformers(layout: Case) -> None:
    results = run_world(layout.tp * layout.pp, first_steps, layout)
    with as_cases():
        for i, family in enumerate(families(layout)):
            case = case_of(layout, family)
            model = configure(case)[0].model
            params = reference.init_random(model, seed=3)
            logits, wanted = hf_logits_and_grads(params, model, batch_of(case, 0))
            for own, _ in (result[i] for result in results):
                torch.testing.assert_close(own, logits, rtol=1e-9, atol=1e-9)
            found = assemble([own for _, own in (result[i] for result in results)], params)
            reference.assert_grads_close(found, wanted, 1e-9)
