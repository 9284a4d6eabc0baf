"""One stage with everything equals transformers' GPT-2 and Llama classes, in fp64."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama import modeling_llama

from megapipe.distributed.mesh import Axis
from megapipe.engine.stage import Stage
from megapipe.layers.microbatch import MicroBatch
from megapipe.layers.parameter import Sharding
from megapipe.model.gpt.stage import GPTStage
from megapipe.model.partition import StageSpec
from megapipe.optim.buffers import Bucket, owned_parameters
from tests.parity.reference import assert_grads_close, init_random, random_batch
from tests.unit.model.transformers_models import CASES, Fp64Torch, hf_logits_and_grads


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "torch", Fp64Torch("torch"))
    base, changes = CASES[case]
    config = base.model_copy(update=changes).resolved(vocab_size=0, sequence_length=0)
    params = init_random(config, seed=7)
    tokens, labels, mask = random_batch(config, b=3, s=17, seed=8, masked=0.2)
    expected_logits, expected = hf_logits_and_grads(params, config, (tokens, labels, mask))

    sharding = Sharding(Axis.alone(), False, torch.float64)
    spec = StageSpec(embedding=True, layers=range(config.layers), head=True)
    module = GPTStage(config, spec, sharding)
    bucket = Bucket(0, list(owned_parameters(module)), Axis.alone(), torch.device("cpu"))
    for entry in bucket.entries:
        full = params[entry.spec.name]
        bucket.view(bucket.weights, entry)[tuple(slice(n) for n in full.shape)] = full
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
        logits = module.logits(None, mb)[..., : config.vocab_size].transpose(0, 1)
    assert (logits - expected_logits).abs().max() <= 1e-9

    stage = Stage(module)
    stage.own_autograd_parameters()
    stage.forward((0, 0), None, mb)
    stage.input_grad((0, 0), None)
    stage.weight_grad((0, 0))
    bucket.add_uses()
    grads = {
        entry.spec.name: bucket.view(bucket.grads[0], entry)[
            tuple(slice(n) for n in entry.spec.shape)
        ]
        for entry in bucket.entries
    }
    assert_grads_close(grads, expected, tolerance=1e-9)
