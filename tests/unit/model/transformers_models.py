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
from transformers.models.bloom.modeling_bloom import BloomMLP

from megapipe.config.model import ModelConfig
from megapipe.config.moe import MoEConfig
from megapipe.config.rope import RopeConfig
from megapipe.model.gpt.hf.config import class_of, config_to_hf
from megapipe.model.gpt.hf.weights import from_hf, to_hf

GPT2 = ModelConfig(
    layers=3, hidden=24, heads=4, vocab_size=37, max_positions=19, norm_eps=1e-4, dtype="fp64"
)
LLAMA = GPT2.model_copy(
    update={
        "norm": "rmsnorm",
        "positions": "rotary",
        "rope": RopeConfig(base=500.0),
        "activation": "swiglu",
        "bias": False,
        "tied_embeddings": False,
        "ffn_hidden": 40,
    }
)
GEMMA = LLAMA.model_copy(
    update={
        # its root is a whole number: transformers keeps that of Gemma 3 in fp32
        "hidden": 16,
        "kv_heads": 4,
        "head_dim": 8,
        "zero_centered_norm": True,
        "post_norms": True,
        "activation": "geglu_tanh",
        "tied_embeddings": True,
        "embedding_scale": 4.0,
        "attention_scale": 12**-0.5,
        "sliding_window": 5,
    }
)
NEOX = GPT2.model_copy(
    update={
        "hidden": 32,
        "positions": "rotary",
        "rope": RopeConfig(percent=0.25),
        "parallel_residual": True,
        "activation": "gelu",
        "tied_embeddings": False,
        "ffn_hidden": 48,
    }
)
BLOOM = {"positions": "alibi", "embedding_norm": True}
LINEAR: dict[str, Any] = {"scaling": "linear", "factor": 3.0}
LLAMA3: dict[str, Any] = {
    "scaling": "llama3",
    "factor": 8.0,
    "original_positions": 12,
    "low_freq_factor": 0.05,
    "high_freq_factor": 1.5,
}
YARN: dict[str, Any] = {
    "scaling": "yarn",
    "factor": 4.0,
    "original_positions": 6,
    "low_freq_factor": 0.1,
    "high_freq_factor": 0.7,
}
YARN_FACTOR: dict[str, Any] = {**YARN, "attention_factor": 1.3}
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
    "llama3.1": (LLAMA, {"rope": RopeConfig(base=500.0, **LLAMA3)}),
    "llama_linear": (LLAMA, {"rope": RopeConfig(base=500.0, **LINEAR)}),
    "llama_yarn": (LLAMA, {"rope": RopeConfig(base=500.0, **YARN)}),
    "llama_yarn_factor": (LLAMA, {"rope": RopeConfig(base=500.0, **YARN_FACTOR)}),
    "qwen2": (LLAMA, {"kv_heads": 4, "qkv_bias": True}),
    "qwen3": (LLAMA, {"kv_heads": 4, "qk_norm": True, "head_dim": 8}),
    "mistral": (LLAMA, {"kv_heads": 4, "sliding_window": 5, "head_dim": 8}),
    "gemma2": (GEMMA, {"attention_softcap": 2.0, "logit_softcap": 3.0, "full_attention_every": 2}),
    "gemma3": (
        GEMMA,
        {
            "qk_norm": True,
            "full_attention_every": 3,
            "rope": RopeConfig(base=500.0, local_base=50.0, scaling="linear", factor=2.0),
        },
    ),
    "pythia": (NEOX, {}),
    "neox_in_turn": (NEOX, {"parallel_residual": False, "rope": RopeConfig(percent=1.0)}),
    "bloom": (GPT2, BLOOM),
    "bloom_12_heads": (GPT2, {**BLOOM, "heads": 12}),
}
"""Their key/value heads can be split over tp 4."""
MIXTURES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "mixtral": (LLAMA, {"kv_heads": 4, "sliding_window": 7, "moe": MoEConfig(num_experts=6)}),
    "qwen3_moe": (
        LLAMA,
        {
            "kv_heads": 2,
            "qk_norm": True,
            "head_dim": 8,
            "moe": MoEConfig(
                num_experts=8,
                top_k=3,
                expert_ffn_hidden=12,
                first_dense_layers=1,
                norm_topk_prob=False,
            ),
        },
    ),
    "qwen3_moe_every": (
        LLAMA,
        {
            "layers": 6,
            "qk_norm": True,
            "moe": MoEConfig(num_experts=4, expert_ffn_hidden=20, layer_freq=2, dense_layers=[3]),
        },
    ),
    "dots1": (
        LLAMA,
        {
            "kv_heads": 4,
            "qk_norm": True,
            "head_dim": 8,
            "moe": MoEConfig(
                num_experts=8,
                top_k=3,
                expert_ffn_hidden=12,
                first_dense_layers=1,
                shared_ffn_hidden=24,
                score_function="sigmoid",
                routed_scaling_factor=2.5,
                num_groups=4,
                topk_groups=2,
                bias_update_rate=0.0,
                aux_loss_coeff=0.0,
            ),
        },
    ),
}
"""With experts."""


def model_of(case: str) -> ModelConfig:
    base, changes = (CASES | FAMILIES | MIXTURES)[case]
    return base.model_copy(update=changes).resolved(vocab_size=0, sequence_length=0)


def for_the_loss_alone(model: ModelConfig) -> ModelConfig:
    """Return the model without terms of experts, which classes do not add to losses by default."""
    if model.moe.num_experts is None:
        return model
    return model.model_copy(update={"moe": model.moe.model_copy(update={"aux_loss_coeff": 0.0})})


class Fp64Torch(ModuleType):
    """torch, but single precision means double: the classes compute norms, softmax and rotary
    angles in float32 whatever the model's dtype."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_double(model: ModelConfig) -> Iterator[None]:
    """Have the model's class compute in fp64 what it otherwise computes in fp32."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        for module in (class_of(model).__module__, "transformers.modeling_rope_utils"):
            found = import_module(module)
            patches.enter_context(mock.patch.object(found, "torch", Fp64Torch("torch")))
        yield


def load_exactly(hf: Any, state: dict[str, Tensor]) -> None:
    """Load the tensors that a class has, neither more nor fewer. In the lowest version the head of
    GPT-NeoX has in its class the name that it has in files."""
    older = "embed_out.weight" in hf.state_dict()
    hf.load_state_dict(
        {n.replace("lm_head", "embed_out") if older else n: tensor for n, tensor in state.items()}
    )


def hf_logits_and_grads(
    params: dict[str, Tensor], model: ModelConfig, batch: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits [b, s, V] and gradients of the mean loss, by the class for the model."""
    with in_double(model):
        ways = {"attn_implementation": "eager", "experts_implementation": "eager"}
        hf = class_of(model)(config_to_hf(model, **ways)).double().train()
        load_exactly(hf, to_hf(params, model))
        for module in hf.modules():
            if isinstance(module, BloomMLP):  # whose own has sqrt(2 / pi) to eight digits
                module.gelu_impl = torch.nn.GELU("tanh")
        tokens, labels, mask = batch
        out = hf(input_ids=tokens, use_cache=False).logits
        losses = F.cross_entropy(out.flatten(0, 1), labels.flatten(), reduction="none")
        losses[mask.flatten()].mean().backward()
    grads = {name: p.grad for name, p in hf.named_parameters()}
    beside = {name: b for name, b in hf.state_dict().items() if name.endswith("correction_bias")}
    found = from_hf(grads | beside, model)
    return out.detach(), {n: g for n, g in found.items() if not n.endswith("router.bias")}
