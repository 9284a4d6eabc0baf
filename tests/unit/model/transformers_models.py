"""The models that are compared with transformers' classes, and what these compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.hf.config import class_of, config_to_hf, row_of
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
_YARN = {
    "rotary_scaling": "yarn",
    "rotary_factor": 4.0,
    "rotary_original_positions": 6,
    "rotary_turns_low": 0.1,
    "rotary_turns_high": 0.7,
}
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "gpt2": (GPT2, {}),
    "gpt2_untied_gelu": (GPT2, {"tied_embeddings": False, "activation": "gelu", "ffn_hidden": 50}),
    "llama": (LLAMA, {}),
    "llama_gqa": (LLAMA, {"kv_heads": 2}),
    "llama_mqa_wide_heads": (LLAMA, {"kv_heads": 1, "head_dim": 10}),
    "llama_biases_tied": (LLAMA, {"kv_heads": 2, "bias": True, "tied_embeddings": True}),
}
"""Base and changes."""
FAMILIES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "llama3.1": (
        LLAMA,
        {
            "rotary_scaling": "llama3",
            "rotary_factor": 8.0,
            "rotary_original_positions": 12,
            "rotary_turns_low": 0.05,
            "rotary_turns_high": 1.5,
        },
    ),
    "llama_linear": (LLAMA, {"rotary_scaling": "linear", "rotary_factor": 3.0}),
    "llama_yarn": (LLAMA, _YARN),
    "llama_yarn_factor": (LLAMA, {**_YARN, "rotary_attention_factor": 1.3}),
    "qwen2": (LLAMA, {"kv_heads": 4, "qkv_bias": True}),
    "qwen3": (LLAMA, {"kv_heads": 4, "qk_norm": True, "head_dim": 8}),
}
"""Of these each has four key/value heads, for tp 4."""


def model_of(case: str) -> ModelConfig:
    base, changes = (CASES | FAMILIES)[case]
    return base.model_copy(update=changes).resolved(vocab_size=0, sequence_length=0)


class Fp64Torch(ModuleType):
    """torch, but single precision means double: the classes compute norms, softmax and rotary
    angles in float32 whatever the model's dtype."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(model: ModelConfig) -> Iterator[None]:
    """The model's class computes in fp64 what it otherwise computes in fp32."""
    name = row_of(model).model_type
    modules = [f"models.{name}.modeling_{name}", "modeling_rope_utils"]
    with ExitStack() as patches:
        for module in modules:
            found = import_module(f"transformers.{module}")
            patches.enter_context(mock.patch.object(found, "torch", Fp64Torch("torch")))
        yield


def hf_logits_and_grads(
    params: dict[str, Tensor], model: ModelConfig, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [b, s, V] and gradients of the mean loss of the class that expresses the model."""
    with in_double(model):
        hf = class_of(model)(config_to_hf(model, attn_implementation="eager")).double().train()
        hf.load_state_dict(to_hf(params, model))
        tokens, labels, mask = batch
        out = hf(input_ids=tokens, use_cache=False).logits
        losses = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
        losses[mask.flatten()].mean().backward()
    grads = {name: p.grad for name, p in hf.named_parameters()}
    return out.detach(), from_hf(grads, model)
