"""The tests' own reference equals transformers' classes, in fp64."""

from typing import Any

import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.config.rope import RopeConfig
from tests.parity.reference import (
    assert_grads_close,
    init_random,
    logits,
    loss_and_grads,
    random_batch,
)
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import (
    CASES,
    FAMILIES,
    GPT2,
    LLAMA,
    MIXTURES,
    for_the_loss_alone,
    hf_logits_and_grads,
    model_of,
)


@in_parts("case", [*CASES, *FAMILIES, *MIXTURES], default=3, full=1)
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    model = for_the_loss_alone(model_of(case))
    params = init_random(model, seed=7)
    batch = random_batch(model, b=3, s=17, seed=8, masked=0.2)

    expected_logits, expected_grads = hf_logits_and_grads(params, model, batch)
    _, grads = loss_and_grads(params, model, batch)

    assert (logits(params, model, batch[0]) - expected_logits).abs().max() <= 1e-9
    assert_grads_close(grads, expected_grads, tolerance=1e-9)
    assert all(torch.count_nonzero(g) for g in grads.values())


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (GPT2, {"activation": "gelu"}),
        (GPT2, {"norm_eps": 1.1e-4}),
        (LLAMA, {"rope": RopeConfig(base=501.0)}),
        (LLAMA, {"norm_eps": 1.1e-4}),
    ],
)
def test_a_slightly_different_model_differs(base: ModelConfig, changes: dict[str, Any]) -> None:
    model = base.resolved(vocab_size=0, sequence_length=0)
    params = init_random(model, seed=7)
    batch = random_batch(model, b=3, s=17, seed=8)
    _, expected = hf_logits_and_grads(params, model, batch)
    _, grads = loss_and_grads(params, model.model_copy(update=changes), batch)
    with pytest.raises(AssertionError, match=r"gradient \S+: largest difference"):
        assert_grads_close(grads, expected, tolerance=1e-9)
