"""Every family, split over ranks, computes what transformers' class computes in one process."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from megapipe.testing import World, run_world
from tests.parity import cases, reference
from tests.parity.ranks import Case, Outcome, assemble, batch_of, configure, run_case
from tests.unit.model.transformers_models import FAMILIES, hf_logits_and_grads, model_of

LAYOUTS = [Case(tp=4), Case(tp=2, pp=2, sequence_parallel=True)]


def case_of(layout: Case, family: str) -> Case:
    """Trains the family's model: every field of it, in the place of a case's own."""
    model = model_of(family)
    assert model.vocab_size is not None
    return replace(layout, model=family, layers=model.layers, vocab=model.vocab_size)


def fields_of(family: str) -> dict[str, object]:
    fields = model_of(family).model_dump()
    return {key: value for key, value in fields.items() if key not in ("dtype", "dropout")}


def run_families(world: World, families: list[str]) -> list[list[Outcome]]:
    """By layout and family."""
    with mock.patch.dict(cases.MODELS, {family: fields_of(family) for family in families}):
        return [
            [run_case(world, case_of(layout, family), validate=False) for family in families]
            for layout in LAYOUTS
        ]


@pytest.mark.full
def test_losses_and_gradients_equal_transformers() -> None:
    families = list(FAMILIES)
    results = run_world(4, run_families, families)
    with mock.patch.dict(cases.MODELS, {family: fields_of(family) for family in families}):
        for j, family in enumerate(families):
            case = case_of(LAYOUTS[0], family)
            model = configure(case)[0].model
            params = reference.init_random(model, seed=3)
            _, wanted = hf_logits_and_grads(params, model, batch_of(case, 0))
            for i in range(len(LAYOUTS)):
                found = assemble([rank[i][j].grads[0] for rank in results], params)
                reference.assert_grads_close(found, wanted, 1e-9)
