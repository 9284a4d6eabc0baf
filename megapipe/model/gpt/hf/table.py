"""Table of the Hugging Face classes that a GPT can be: one entry for each ``model_type``.

An entry can express a model if each field of the model is in one of the entry's mappings, has the
value that the entry fixes, or has its default. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megapipe.config.model import ModelConfig
from megapipe.model.gpt.hf.experts import DOTS1_EXPERTS, MIXTRAL_EXPERTS, QWEN3_EXPERTS
from megapipe.model.gpt.hf.field_mappings import (
    APART_HEADS,
    APART_HEADS_OR_SHARED_OUT,
    GROUPED_HEADS,
    GROUPED_WHOLE_HEADS,
    QUERY_SCALE,
    WHOLE_HEADS,
    WINDOWS,
    FieldMapping,
    Misfit,
    activation,
    equal,
    of_hidden,
    pair_or,
    pairs,
)
from megapipe.model.gpt.hf.rope import PARTIAL_ROPE, ROPE, ROPE_BY_WINDOW

TensorLayout = Literal["same", "transposed", "apart", "blocks", "stacked", "pairs", "joined"]
"""How a class stores a global tensor. `same`: unchanged. `transposed`: [in, out]. `apart`: as three
tensors q, k and v. `blocks`: as one tensor q | k | v, transposed. `stacked`: a tensor each for gate
and up, or a tensor per expert. `pairs`: tensors of gate and up for each expert. `joined`: the rows
of gate and up in one tensor."""


class Tensors(NamedTuple):
    """Names that a class gives to the weight and the bias of one of megapipe's modules."""

    names: tuple[str, ...]
    """Names of modules or tensors; {} in a name stands for the index of an expert."""
    arrangement: TensorLayout = "same"
    whole: bool = False
    """Whether the names are complete, and get no suffix `.weight` or `.bias`."""

    def of_kind(self, kind: str, count: int) -> tuple[str, ...]:
        """Return the names of all weights or biases (`kind`), for each of `count` experts."""
        end = "" if self.whole else f".{kind}"
        numbers = range(count) if "{}" in self.names[0] else range(1)
        return tuple(f"{name.format(number)}{end}" for number in numbers for name in self.names)


@dataclass(frozen=True)
class HFClass:
    """A Hugging Face class: names of tensors, and mappings of the config's keys."""

    model_type: str
    config_class: str
    """Name of the config class in transformers."""
    model_class: str
    prefix: str
    """Prefix of all names except the head's; missing in files of a model without a head."""
    modules: Mapping[str, str]
    """The class's names of modules outside of the layers, by megapipe's names."""
    layers: str
    """Name of the list of layers in a state dict."""
    layer: Mapping[str, Tensors]
    """The class's names inside a layer of a state dict, by megapipe's names."""
    parts: tuple[FieldMapping, ...]
    fixed: Mapping[str, Any]
    """Fields of :class:`ModelConfig`, and the values, other than their defaults, that they have in
    all models of the class."""
    required: Mapping[str, Any] = field(default_factory=dict)
    """Values that other keys of the class's config must have."""
    files: Mapping[str, Tensors] = field(default_factory=dict)
    """The class's names in files, by megapipe's names, if those in a state dict differ."""

    @property
    def has_experts(self) -> bool:
        """Whether models of the class have experts."""
        return any("moe" in part.fields for part in self.parts)

    def counterpart(self, name: str, *, in_files: bool = False) -> Tensors:
        """Return the class's full names for megapipe's module or buffer `name`, in a state dict or
        in files."""
        if not name.startswith("layers."):
            tensors = Tensors((self.modules[name],))
            return self.files.get(name, tensors) if in_files else tensors
        _, number, module = name.split(".", 2)
        inner = self.layer[module]
        if in_files:
            inner = self.files.get(module, inner)
        return inner._replace(names=tuple(f"{self.layers}.{number}.{n}" for n in inner.names))

    def misfits(self, model: ModelConfig) -> Iterator[Misfit]:
        """Yield what the class cannot express of a resolved model."""
        free = {name for part in (*self.parts, _EVERYWHERE) for name in part.fields}
        for name, info in ModelConfig.model_fields.items():
            wanted = self.fixed.get(name, info.get_default(call_default_factory=True))
            if name in free or getattr(model, name) == wanted:
                continue
            if name == "moe":
                yield Misfit("moe.num_experts", model.moe.num_experts, "null")
            else:
                yield Misfit(name, getattr(model, name), str(wanted))
        for part in self.parts:
            yield from part.misfits(model)


_EVERYWHERE = pairs(dtype="dtype")
"""Field mapping that every class has: weights may have any type."""

_COMMON = pairs(
    vocab_size="vocab_size", init_std="initializer_range", tied_embeddings="tie_word_embeddings"
)
_SIZES = pairs(
    layers="num_hidden_layers",
    hidden="hidden_size",
    heads="num_attention_heads",
    max_positions="max_position_embeddings",
)
_WIDTH = pairs(ffn_hidden="intermediate_size")
_SILU = activation("hidden_act", {"silu": "swiglu", "swish": "swiglu"})
_MIXTRAL_PARTS = (_COMMON, _SIZES, _SILU, ROPE, pairs(norm_eps="rms_norm_eps"))
_LLAMA_PARTS = (*_MIXTRAL_PARTS, _WIDTH)
_LLAMA_FIXED = {"norm": "rmsnorm", "positions": "rotary"}
_GEMMA_PARTS = (
    _COMMON,
    _SIZES,
    _WIDTH,
    GROUPED_HEADS,
    activation("hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh"}),
    WINDOWS,
    QUERY_SCALE,
    of_hidden("embedding_scale", lambda hidden: hidden**0.5, "sqrt(hidden)"),
    pairs(norm_eps="rms_norm_eps", logit_softcap="final_logit_softcapping"),
)
_GEMMA_FIXED = {**_LLAMA_FIXED, "bias": False, "zero_centered_norm": True, "post_norms": True}

_LLAMA_MODULES = {
    "embedding.word": "model.embed_tokens",
    "final_norm": "model.norm",
    "head": "lm_head",
}
_LLAMA_LAYER = {
    "attention_norm": Tensors(("input_layernorm",)),
    "attention.qkv": Tensors(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "apart"),
    "attention.q_norm": Tensors(("self_attn.q_norm",)),
    "attention.k_norm": Tensors(("self_attn.k_norm",)),
    "attention.out": Tensors(("self_attn.o_proj",)),
    "mlp_norm": Tensors(("post_attention_layernorm",)),
    "mlp.up": Tensors(("mlp.gate_proj", "mlp.up_proj"), "stacked"),
    "mlp.down": Tensors(("mlp.down_proj",)),
}
_EXPERTS = {
    "moe.router": Tensors(("mlp.gate",)),
    "moe.up": Tensors(("mlp.experts.gate_up_proj",), "joined", whole=True),
    "moe.down": Tensors(("mlp.experts.down_proj",), whole=True),
}
_EXPERTS_IN_FILES = {
    "moe.up": Tensors(("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"), "pairs"),
    "moe.down": Tensors(("mlp.experts.{}.down_proj",), "stacked"),
}

_GPT2 = HFClass(
    "gpt2",
    "GPT2Config",
    "GPT2LMHeadModel",
    prefix="transformer.",
    modules={
        "embedding.word": "transformer.wte",
        "embedding.position": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layers="transformer.h",
    layer={
        "attention_norm": Tensors(("ln_1",)),
        "attention.qkv": Tensors(("attn.c_attn",), "blocks"),
        "attention.out": Tensors(("attn.c_proj",), "transposed"),
        "mlp_norm": Tensors(("ln_2",)),
        "mlp.up": Tensors(("mlp.c_fc",), "transposed"),
        "mlp.down": Tensors(("mlp.c_proj",), "transposed"),
    },
    parts=(
        _COMMON,
        pairs(
            layers="n_layer",
            hidden="n_embd",
            heads="n_head",
            ffn_hidden="n_inner",
            max_positions="n_positions",
            norm_eps="layer_norm_epsilon",
        ),
        WHOLE_HEADS,
        activation(
            "activation_function",
            {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
        ),
        equal("dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    fixed={},
    required={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
)

_LLAMA = HFClass(
    "llama",
    "LlamaConfig",
    "LlamaForCausalLM",
    prefix="model.",
    modules=_LLAMA_MODULES,
    layers="model.layers",
    layer=_LLAMA_LAYER,
    parts=(*_LLAMA_PARTS, GROUPED_HEADS, equal("bias", "attention_bias", "mlp_bias")),
    fixed=_LLAMA_FIXED,
    required={"attention_dropout": 0},
)

_QWEN2 = replace(
    _LLAMA,
    model_type="qwen2",
    config_class="Qwen2Config",
    model_class="Qwen2ForCausalLM",
    parts=(*_LLAMA_PARTS, GROUPED_WHOLE_HEADS),
    fixed={**_LLAMA_FIXED, "bias": False, "qkv_bias": True},
    required={"attention_dropout": 0, "use_sliding_window": False},
)

_QWEN3 = replace(
    _LLAMA,
    model_type="qwen3",
    config_class="Qwen3Config",
    model_class="Qwen3ForCausalLM",
    parts=(*_LLAMA_PARTS, APART_HEADS),
    fixed={**_LLAMA_FIXED, "bias": False, "qk_norm": True},
    required={"attention_dropout": 0, "use_sliding_window": False, "attention_bias": False},
)

_MISTRAL = replace(
    _LLAMA,
    model_type="mistral",
    config_class="MistralConfig",
    model_class="MistralForCausalLM",
    parts=(*_LLAMA_PARTS, APART_HEADS, pairs(sliding_window="sliding_window")),
    fixed={**_LLAMA_FIXED, "bias": False},
)

_MIXTRAL = replace(
    _MISTRAL,
    model_type="mixtral",
    config_class="MixtralConfig",
    model_class="MixtralForCausalLM",
    layer={**_LLAMA_LAYER, **_EXPERTS},
    parts=(
        *_MIXTRAL_PARTS,
        APART_HEADS_OR_SHARED_OUT,
        pairs(sliding_window="sliding_window"),
        MIXTRAL_EXPERTS,
    ),
    required={"attention_dropout": 0, "router_jitter_noise": 0.0},
    files={
        "moe.router": Tensors(("block_sparse_moe.gate",)),
        "moe.up": Tensors(
            ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"), "pairs"
        ),
        "moe.down": Tensors(("block_sparse_moe.experts.{}.w2",), "stacked"),
    },
)

_QWEN3_MOE = replace(
    _QWEN3,
    model_type="qwen3_moe",
    config_class="Qwen3MoeConfig",
    model_class="Qwen3MoeForCausalLM",
    layer={**_LLAMA_LAYER, **_EXPERTS},
    parts=(*_LLAMA_PARTS, APART_HEADS_OR_SHARED_OUT, QWEN3_EXPERTS),
    files=_EXPERTS_IN_FILES,
)

_DOTS1 = replace(
    _QWEN3_MOE,
    model_type="dots1",
    config_class="Dots1Config",
    model_class="Dots1ForCausalLM",
    layer={
        **_LLAMA_LAYER,
        **_EXPERTS,
        "moe.router.bias": Tensors(("mlp.gate.e_score_correction_bias",), whole=True),
        "moe.shared.up": Tensors(
            ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), "stacked"
        ),
        "moe.shared.down": Tensors(("mlp.shared_experts.down_proj",)),
    },
    parts=(*_LLAMA_PARTS, APART_HEADS_OR_SHARED_OUT, WINDOWS, DOTS1_EXPERTS),
    required={"attention_dropout": 0, "attention_bias": False},
)

_GEMMA2 = replace(
    _LLAMA,
    model_type="gemma2",
    config_class="Gemma2Config",
    model_class="Gemma2ForCausalLM",
    layer={
        **_LLAMA_LAYER,
        "attention_post_norm": Tensors(("post_attention_layernorm",)),
        "mlp_norm": Tensors(("pre_feedforward_layernorm",)),
        "mlp_post_norm": Tensors(("post_feedforward_layernorm",)),
    },
    parts=(*_GEMMA_PARTS, ROPE, pairs(attention_softcap="attn_logit_softcapping")),
    fixed=_GEMMA_FIXED,
    required={
        "attention_dropout": 0,
        "attention_bias": False,
        "use_bidirectional_attention": None,
    },
)

_GEMMA3 = replace(
    _GEMMA2,
    model_type="gemma3_text",
    config_class="Gemma3TextConfig",
    model_class="Gemma3ForCausalLM",
    parts=(*_GEMMA_PARTS, ROPE_BY_WINDOW),
    fixed={**_GEMMA_FIXED, "qk_norm": True},
    required={
        **_GEMMA2.required,
        "use_bidirectional_attention": False,
        "attn_logit_softcapping": None,  # the class ignores it
    },
)

_MEGATRON_MLP = {
    "mlp_norm": Tensors(("post_attention_layernorm",)),
    "mlp.up": Tensors(("mlp.dense_h_to_4h",)),
    "mlp.down": Tensors(("mlp.dense_4h_to_h",)),
}

_NEOX = HFClass(
    "gpt_neox",
    "GPTNeoXConfig",
    "GPTNeoXForCausalLM",
    prefix="gpt_neox.",
    modules={
        "embedding.word": "gpt_neox.embed_in",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "lm_head",
    },
    layers="gpt_neox.layers",
    layer={
        "attention_norm": Tensors(("input_layernorm",)),
        # rows of query, key and value by head: our groups, of one query head each
        "attention.qkv": Tensors(("attention.query_key_value",)),
        "attention.out": Tensors(("attention.dense",)),
        **_MEGATRON_MLP,
    },
    parts=(
        _COMMON,
        _SIZES,
        _WIDTH,
        WHOLE_HEADS,
        activation(
            "hidden_act",
            {
                "gelu": "gelu",
                "gelu_new": "gelu_tanh",
                "gelu_pytorch_tanh": "gelu_tanh",
                "gelu_fast": "gelu_tanh",  # GPT-NeoX 20B's name; only rounded constants differ
            },
        ),
        PARTIAL_ROPE,
        pairs(norm_eps="layer_norm_eps", parallel_residual="use_parallel_residual"),
        equal("dropout", "hidden_dropout", "attention_dropout"),
    ),
    fixed={"positions": "rotary"},
    required={"attention_bias": True},
    files={"head": Tensors(("embed_out",))},
)

_BLOOM = HFClass(
    "bloom",
    "BloomConfig",
    "BloomForCausalLM",
    prefix="transformer.",
    modules={
        "embedding.word": "transformer.word_embeddings",
        "embedding.norm": "transformer.word_embeddings_layernorm",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layers="transformer.h",
    layer={
        "attention_norm": Tensors(("input_layernorm",)),
        "attention.qkv": Tensors(("self_attention.query_key_value",)),  # like GPT-NeoX
        "attention.out": Tensors(("self_attention.dense",)),
        **_MEGATRON_MLP,
    },
    parts=(
        _COMMON,
        pairs(
            layers="n_layer",
            hidden="hidden_size",
            heads="n_head",
            norm_eps="layer_norm_epsilon",
        ),
        pair_or("max_positions", "seq_length", 2048),  # not a transformers key, and no limit
        WHOLE_HEADS,
        of_hidden("ffn_hidden", lambda hidden: 4 * hidden, "4 x hidden"),
    ),
    fixed={"positions": "alibi", "embedding_norm": True},
    required={
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0,
        "attention_dropout": 0,
    },
)

_ROWS = (
    *(_GPT2, _LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GEMMA2, _GEMMA3, _NEOX, _BLOOM),
    *(_MIXTRAL, _QWEN3_MOE, _DOTS1),
)

TABLE = {row.model_type: row for row in _ROWS}
"""Entries by model_type; the first that expresses a model is used for it."""
