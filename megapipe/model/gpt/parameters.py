"""Specs of a GPT's parameters: names, global shapes, initial values, and splits over ranks.

Checkpoints use the same names and global shapes. Needs no torch.
"""

import math
from collections.abc import Iterator, Mapping

from megapipe.config.model import ModelConfig
from megapipe.layers.moe.specs import bias_name
from megapipe.layers.specs import (
    JoinedHeads,
    ParameterSpec,
    column_linear,
    head_norm,
    norm,
    positions,
    row_linear,
    vocabulary,
)
from megapipe.model.gpt.moe.layers import moe_parameters
from megapipe.model.partition import StageSpec

Named = Mapping[str, ParameterSpec]

WORD_EMBEDDING = "embedding.word.weight"
POSITION_EMBEDDING = "embedding.position.weight"
EMBEDDING_NORM = "embedding.norm"


def stage_parameters(model: ModelConfig, stage: StageSpec) -> Iterator[ParameterSpec]:
    """Yield the parameters of a stage of a resolved model, in the order of the forward.

    A tied head is yielded as a second use of the embedding's matrix, even in the same stage.
    """
    if stage.embedding:
        yield word_embedding(model)
        if model.positions == "learned":
            rows = known(model.max_positions)
            yield positions(POSITION_EMBEDDING, rows, model.hidden, std=model.init_std)
        if model.embedding_norm:
            yield from norm_parameters(model, EMBEDDING_NORM)
    for layer in stage.layers:
        yield from block_parameters(model, layer)
    if stage.head:
        yield from norm_parameters(model, "final_norm")
        yield head(model)


def word_embedding(model: ModelConfig) -> ParameterSpec:
    """Return the spec of the input embedding, [vocabulary, h]."""
    return vocabulary(
        WORD_EMBEDDING,
        known(model.vocab_size),
        model.hidden,
        role="embedding",
        std=model.init_std,
        tied=model.tied_embeddings,
    )


def head(model: ModelConfig) -> ParameterSpec:
    """Return the spec of the head's matrix, [vocabulary, h]."""
    return vocabulary(
        WORD_EMBEDDING if model.tied_embeddings else "head.weight",
        known(model.vocab_size),
        model.hidden,
        role="head",
        std=model.init_std,
        tied=model.tied_embeddings,
    )


def block_parameters(model: ModelConfig, layer: int) -> Iterator[ParameterSpec]:
    """Yield the parameters of one layer. As in GPT-2, initial values of matrices that write to the
    residual stream are divided by sqrt(2 layers)."""
    name, h, std = f"layers.{layer}", model.hidden, model.init_std
    groups = known(model.kv_heads)
    joined = JoinedHeads((model.heads // groups, 1, 1), known(model.head_dim))
    qkv, heads = groups * joined.rows, model.heads * joined.size
    ffn = known(model.ffn_hidden)
    up = (2, ffn, h) if model.gated else (ffn, h)
    residual_std, bias = std / math.sqrt(2 * model.layers), model.bias
    yield from norm_parameters(model, f"{name}.attention_norm")
    yield from column_linear(
        f"{name}.attention.qkv", (qkv, h), bias=model.has_qkv_bias, std=std, joined=joined
    )
    if model.qk_norm:
        for part in ("q_norm", "k_norm"):
            yield head_norm(f"{name}.attention.{part}", known(model.head_dim), _fill(model))
    yield from row_linear(f"{name}.attention.out", (h, heads), bias=bias, std=residual_std)
    if model.post_norms:
        yield from norm_parameters(model, f"{name}.attention_post_norm")
    yield from norm_parameters(model, f"{name}.mlp_norm")
    if model.moe.has_experts(layer):
        yield from moe_parameters(model, layer)
    else:
        yield from column_linear(f"{name}.mlp.up", up, bias=bias, std=std)
        yield from row_linear(f"{name}.mlp.down", (h, ffn), bias=bias, std=residual_std)
    if model.post_norms:
        yield from norm_parameters(model, f"{name}.mlp_post_norm")


def norm_parameters(model: ModelConfig, name: str) -> Iterator[ParameterSpec]:
    """Yield the parameters of a norm; rmsnorm has no bias."""
    bias = model.bias and model.norm != "rmsnorm"
    return norm(name, model.hidden, bias=bias, fill=_fill(model))


def _fill(model: ModelConfig) -> float:
    return 0.0 if model.zero_centered_norm else 1.0


def layer_of(named: Named, name: str) -> tuple[ParameterSpec, ParameterSpec | None]:
    """Return weight and bias (or None) of the linear layer or norm `name`."""
    return named[f"{name}.weight"], named.get(f"{name}.bias")


def known(size: int | None) -> int:
    """Return `size`; raise ValueError if it is None: the model is not resolved."""
    if size is None:
        raise ValueError("the model is not resolved: a size is None")
    return size


def buffers(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the routers' buffers by checkpoint name."""
    moe = model.moe
    if moe.bias_update_rate is None:
        return {}
    layers = filter(moe.has_experts, range(model.layers))
    return {bias_name(layer): (moe.experts_of(layer),) for layer in layers}
