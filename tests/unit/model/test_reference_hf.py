"""The tests' own reference equals transformers' GPT-2 and Llama classes, in fp64."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.hf import config_to_hf, from_hf, to_hf
from tests.parity.reference import (
    assert_grads_close,
    init_random,
    logits,
    loss_and_grads,
    random_batch,
)

GPT2 = ModelConfig(
    layers=3, hidden=24, heads=4, vocab_size=37, max_positions=19, norm_eps=1e-4, dtype="fp64"
)
LLAMA = GPT2.model_copy(
    update={
        "norm": "rmsnorm",
        "positions": "rotary",
        "rotary_base": 500.0,
        "activation": "swiglu",
        "bias": False,
        "tied_embeddings": False,
        "ffn_hidden": 40,
    }
)
CASES = {
    "gpt2": (GPT2, {}),
    "gpt2_untied_gelu": (GPT2, {"tied_embeddings": False, "activation": "gelu", "ffn_hidden": 50}),
    "llama": (LLAMA, {}),
    "llama_gqa": (LLAMA, {"kv_heads": 2}),
    "llama_mqa_wide_heads": (LLAMA, {"kv_heads": 1, "head_dim": 10}),
    "llama_biases_tied": (LLAMA, {"kv_heads": 2, "bias": True, "tied_embeddings": True}),
}


class _Fp64Torch(ModuleType):
    """torch, but single precision means double: Llama's class computes norms, softmax and rotary
    angles in float32 whatever the model's dtype."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def hf_logits_and_grads(
    params: dict[str, Tensor], model: ModelConfig, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    hf_class = GPT2LMHeadModel if model.positions == "learned" else LlamaForCausalLM
    hf = hf_class(config_to_hf(model, attn_implementation="eager")).double().train()
    hf.load_state_dict(to_hf(params, model))
    tokens, labels, mask = batch
    out = hf(input_ids=tokens, use_cache=False).logits
    losses = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
    losses[mask.flatten()].mean().backward()
    grads = {name: p.grad for name, p in hf.named_parameters()}
    return out.detach(), from_hf(grads, model)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_equal_transformers(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "torch", _Fp64Torch("torch"))
    base, changes = CASES[case]
    model = base.model_copy(update=changes).resolved(vocab_size=0, sequence_length=0)
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
        (LLAMA, {"rotary_base": 501.0}),
        (LLAMA, {"norm_eps": 1.1e-4}),
    ],
)
def test_a_slightly_different_model_differs(
    base: ModelConfig, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_llama, "torch", _Fp64Torch("torch"))
    model = base.resolved(vocab_size=0, sequence_length=0)
    params = init_random(model, seed=7)
    batch = random_batch(model, b=3, s=17, seed=8)
    _, expected = hf_logits_and_grads(params, model, batch)
    _, grads = loss_and_grads(params, model.model_copy(update=changes), batch)
    with pytest.raises(AssertionError, match=r"gradient \S+: largest difference"):
        assert_grads_close(grads, expected, tolerance=1e-9)
