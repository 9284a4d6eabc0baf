"""Experts in narrow types, compared under the router's choices, which are checked separately; and
the type in which routers compute."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.moe import routing
from megapipe.layers.moe.experts import RoutedExperts
from megapipe.layers.moe.routers import Router
from tests.parity import reference
from tests.parity.forced_routing import evenly
from tests.parity.mixture import Told
from tests.parity.ranks import Case, configure
from tests.parity.stage_cases import main_grads, new_stage

ROWS, LENGTH, SCALE = 4, 8, 2.0**10


def recorded(found: list[tuple[Tensor, Tensor]]) -> Any:
    """Record scores and choices of each layer that makes some."""
    choose = routing.route_tokens

    def spy(p: Tensor, *given: Any) -> Tensor:
        found.append((p, choose(p, *given)))
        return found[-1][1]

    return mock.patch.object(routing, "route_tokens", spy)


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


class Forward:
    """A forward of a small model with experts, and what these were given, found and returned."""

    def __init__(self, **case: Any) -> None:
        model = configure(Case(tied=False, **case))[0].model
        tokens, labels, mask = reference.random_batch(model, ROWS, LENGTH, seed=1)
        self.mb = MicroBatch(0, 0, 1, tokens, labels, mask)
        self.stage, _ = new_stage(model, reference.init_random(model, seed=3))
        self.layers = [
            each for each in self.stage.module.modules() if isinstance(each, RoutedExperts)
        ]
        self.tokens: list[Tensor] = []
        """Inputs of each layer, [tokens, h]."""
        self.logits: list[Tensor] = []
        """[tokens, experts]."""
        self.outputs: list[Tensor] = []
        """[tokens, h]."""
        for layer in self.layers:
            layer.register_forward_hook(self._note)
        kind = type(self.layers[0].routing.router)
        scores = kind.scores

        def spy(router: Router, logits: Tensor) -> Tensor:
            self.logits.append(logits)
            return scores(router, logits)

        with mock.patch.object(kind, "scores", spy):
            self.stage.forward((0, 0), None, self.mb)

    def _note(self, _: Any, given: tuple[Any, ...], output: Tensor) -> None:
        self.tokens.append(given[0].detach().flatten(0, 1))
        self.outputs.append(output.detach().flatten(0, 1))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("moe", ["top 2", "groups"])
def test_a_router_computes_in_fp32(moe: str, dtype: str) -> None:
    """Tokens and weights have the model's type; a product in that type would be another one."""
    run = Forward(moe=moe, dtype=dtype, layers=3)
    narrow = reference.COMPUTE_DTYPES[dtype]
    for layer, tokens, logits in zip(run.layers, run.tokens, run.logits, strict=True):
        router = layer.router.detach()
        assert tokens.dtype == router.dtype == narrow
        assert logits.equal(tokens.float() @ router.float().t())
        assert not logits.equal((tokens @ router.t()).float())


def test_a_token_whose_only_choice_is_dropped_has_no_output() -> None:
    """Switch Transformer: such a token passes on the residual alone."""
    found: list[tuple[Tensor, Tensor]] = []
    with recorded(found):
        run = Forward(moe="top 1, capacity 1", dtype="fp64")
    ((_, choice),), (output,) = found, run.outputs
    dropped = (choice < 0).flatten()
    assert 0 < dropped.sum() < ROWS * LENGTH
    assert not output[dropped].any()
    assert output[~dropped].any(1).all()


def test_with_one_choice_each_the_balance_term_is_one_where_tokens_are_spread_evenly() -> None:
    """It is one whatever the scores are."""
    with evenly():
        run = Forward(moe="top 1, capacity 1", dtype="fp64")
    (layer,) = run.layers
    load = run.mb.scratch.by_layer(routing.LOAD)[layer.layer]
    tokens, balance, _, dropped, *counts = load.tolist()
    assert balance / tokens == pytest.approx(1, rel=1e-14)
    assert dropped == 0
    assert counts == [tokens / 4] * 4
    scores = run.logits[0].softmax(-1)
    assert scores.max() > 0.3, "scores are not even"
