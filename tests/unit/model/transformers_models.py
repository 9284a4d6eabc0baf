"""The models that are compared with transformers' classes, and what these compute."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.hf.config import class_of, config_to_hf
from megapipe.model.gpt.hf.weights import from_hf, to_hf

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


class Fp64Torch(ModuleType):
    """torch, but single precision means double: Llama's class computes norms, softmax and rotary
    angles in float32 whatever the model's dtype."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def hf_logits_and_grads(
    params: dict[str, Tensor], model: ModelConfig, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    hf = class_of(model)(config_to_hf(model, attn_implementation="eager")).double().train()
    hf.load_state_dict(to_hf(params, model))
    tokens, labels, mask = batch
    out = hf(input_ids=tokens, use_cache=False).logits
    losses = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
    losses[mask.flatten()].mean().backward()
    grads = {name: p.grad for name, p in hf.named_parameters()}
    return out.detach(), from_hf(grads, model)
