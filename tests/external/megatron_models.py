"""Models of transformers as megatron-core builds them: its arguments and its names of the
weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

GATED = "linear_fc1.weight"
"""End of the name of a tensor that holds two matrices if the model has a gate."""
Weights = Mapping[str, Tensor]


class Form(NamedTuple):
    """A model in megatron-core's terms."""

    transformer: dict[str, Any]
    """Arguments of its `TransformerConfig`."""
    model: dict[str, Any]
    """Arguments of its `GPTModel`."""
    renamed: Callable[[Weights], dict[str, Tensor]]
    """Makes whole weights of megatron-core from the weights of transformers."""


def form_of(config: PretrainedConfig) -> Form:
    if isinstance(config, LlamaConfig):
        return _llama(config)
    assert isinstance(config, GPT2Config)
    return _gpt2(config)


def _llama(config: LlamaConfig) -> Form:
    transformer = {
        "num_query_groups": config.num_key_value_heads,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
    }
    model = {
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": int(config.rope_parameters["rope_theta"]),
    }
    names = {
        "input_layernorm": "input_layernorm",
        "self_attn.o_proj": "self_attention.linear_proj",
        "post_attention_layernorm": "pre_mlp_layernorm",
        "mlp.down_proj": "mlp.linear_fc2",
    }

    def renamed(state: Weights) -> dict[str, Tensor]:
        """Queries, key and value of one group are side by side."""
        found = {
            "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
            "decoder.final_layernorm.weight": state["model.norm.weight"],
            "output_layer.weight": state["lm_head.weight"],
        }
        for layer in range(config.num_hidden_layers):
            ours, theirs = f"model.layers.{layer}", f"decoder.layers.{layer}"
            for name, its in names.items():
                found[f"{theirs}.{its}.weight"] = state[f"{ours}.{name}.weight"]
            groups = [
                state[f"{ours}.self_attn.{name}_proj.weight"].unflatten(
                    0, (config.num_key_value_heads, -1)
                )
                for name in "qkv"
            ]
            found[f"{theirs}.self_attention.linear_qkv.weight"] = torch.cat(groups, 1).flatten(0, 1)
            gated = [state[f"{ours}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
            found[f"{theirs}.mlp.{GATED}"] = torch.cat(gated)
        return found

    return Form(transformer, model, renamed)


def _gpt2(config: GPT2Config) -> Form:
    transformer = {
        "ffn_hidden_size": 4 * config.n_embd,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "activation_func": partial(functional.gelu, approximate="tanh"),
    }
    model = {
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "position_embedding_type": "learned_absolute",
    }
    names = {
        "ln_1": "input_layernorm",
        "attn.c_attn": "self_attention.linear_qkv",
        "attn.c_proj": "self_attention.linear_proj",
        "ln_2": "pre_mlp_layernorm",
        "mlp.c_fc": "mlp.linear_fc1",
        "mlp.c_proj": "mlp.linear_fc2",
    }

    def renamed(state: Weights) -> dict[str, Tensor]:
        """Matrices are [out, in]; query, key and value of one head are side by side."""
        embedding = state["transformer.wte.weight"]
        found = {
            "embedding.word_embeddings.weight": embedding,
            "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
            "decoder.final_layernorm.weight": state["transformer.ln_f.weight"],
            "decoder.final_layernorm.bias": state["transformer.ln_f.bias"],
            "output_layer.weight": embedding,
        }
        for layer in range(config.n_layer):
            for name, its in names.items():
                for kind in ("weight", "bias"):
                    value = state[f"transformer.h.{layer}.{name}.{kind}"]
                    value = value.t() if value.dim() == 2 else value
                    if name == "attn.c_attn":
                        parts = value.unflatten(0, (3, config.n_head, -1))
                        value = parts.transpose(0, 1).flatten(0, 2)
                    found[f"decoder.layers.{layer}.{its}.{kind}"] = value
        return found

    return Form(transformer, model, renamed)
