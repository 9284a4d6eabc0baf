"""One stage with everything equals transformers' classes, in fp64, token by token too."""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.generate.cached_decoder import CachedDecoder
from megapipe.layers.microbatch import MicroBatch
from tests.parity.in_memory_models import held_model
from tests.parity.reference import assert_grads_close, init_random, random_batch
from tests.parity.stage_cases import main_grads, new_stage
from tests.parity.tiers import in_parts
from tests.unit.model.transformers_models import (
    CASES,
    FAMILIES,
    MIXTURES,
    for_the_loss_alone,
    hf_logits_and_grads,
    model_of,
)


@in_parts("case", [*CASES, *FAMILIES, *MIXTURES], default=2, full=1)
def test_logits_and_gradients_equal_transformers(case: str) -> None:
    config = for_the_loss_alone(model_of(case))
    params = init_random(config, seed=7)
    tokens, labels, mask = random_batch(config, b=3, s=17, seed=8, masked=0.2)
    expected_logits, expected = hf_logits_and_grads(params, config, (tokens, labels, mask))

    stage, bucket = new_stage(config, params)
    mb = MicroBatch(
        index=0,
        step=0,
        seed=0,
        tokens=tokens,
        labels=labels,
        mask=mask.bool(),
        scale=1.0 / int(mask.sum()),
    )
    with torch.no_grad():
        logits = stage.module.logits(None, mb)[..., : config.vocab_size].transpose(0, 1)
    assert (logits - expected_logits).abs().max() <= 1e-9
    check_reading(params, config, tokens[0], expected_logits[0])

    stage.forward((0, 0), None, mb)
    stage.input_grad((0, 0), None)
    stage.weight_grad((0, 0))
    bucket.sum_tied_grads()
    assert_grads_close(main_grads([bucket]), expected, tolerance=1e-9)


def check_reading(
    params: dict[str, Tensor], config: ModelConfig, tokens: Tensor, logits: Tensor
) -> None:
    """Check two texts side by side, one behind padding, token by token from the cache."""
    texts, ahead = [tokens[:9].tolist(), tokens[:4].tolist()], tokens.tolist()
    reading = CachedDecoder(held_model(config, params, context=17), texts, room=4)
    for i in range(4):
        found = reading.logits()
        assert found is not None
        for row, at in zip(found, (8 + i, 3 + i), strict=True):
            assert (row - logits[at]).abs().max() <= 1e-9
        reading.append([ahead[9 + i], ahead[4 + i]])
