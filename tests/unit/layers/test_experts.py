"""Experts in narrow types: compared under the choice that was made, which is checked by itself."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe.layers import routing
from megapipe.layers.microbatch import MicroBatch
from tests.parity import reference
from tests.parity.mixture import Told
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_stage

ROWS, LENGTH, SCALE = 4, 8, 2.0**10


def recorded(found: list[tuple[Tensor, Tensor]]) -> Any:
    """Scores and choices of each layer that makes some."""
    choose = routing.choose

    def spy(p: Tensor, *given: Any) -> Tensor:
        found.append((p, choose(p, *given)))
        return found[-1][1]

    return mock.patch.object(routing, "choose", spy)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("kind", "moe"), [("llama", "top 2"), ("gpt2", "shared, gated")])
def test_gradients_are_as_exact_as_plain_ones(kind: str, moe: str, dtype: str) -> None:
    model = configure(Case(model=kind, moe=moe, dtype=dtype, layers=2, tied=False))[0].model
    exact_model = model.model_copy(update={"dtype": "fp64"})
    params = reference.init_random(model, seed=3)
    compute = reference.COMPUTE_DTYPES[dtype]
    params = {name: p.to(compute).double() for name, p in params.items()}
    batch = reference.random_batch(model, ROWS, LENGTH, seed=1)
    tokens, labels, mask = batch
    factor = SCALE if dtype == "fp16" else 1.0
    unit = factor / tokens.numel()
    mb = MicroBatch(0, 0, 1, tokens, labels, mask, scale=unit, position_scale=unit)
    stage, bucket = new_stage(model, params)
    found: list[tuple[Tensor, Tensor]] = []
    with recorded(found):
        stage.forward((0, 0), None, mb)
        stage.backward((0, 0), None)
    grads = {name: grad / factor for name, grad in main_grads([bucket]).items()}
    given = [choice.long().view(LENGTH, ROWS, -1).transpose(0, 1) for _, choice in found]
    for p, choice in found:
        assert p.dtype == torch.float32
        least = p.gather(1, choice.long()).min(1).values
        others = p.scatter(1, choice.long(), -1.0).max(1).values
        assert (least >= others).all()
    told = [Told(ROWS, given=given) for _ in range(2)]
    _, exact = reference.loss_and_grads(params, exact_model, batch, told=told[0])
    _, plain = reference.loss_and_grads(params, model, batch, scale=factor, told=told[1])
    reference.assert_error_like(grads, plain, exact, kind=lambda name: name.partition(".")[0])
