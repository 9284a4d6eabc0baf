"""Configurations of Hugging Face's GPT-2 and Llama, both ways.

A model with learned positions is a GPT-2, one with rotary positions a Llama; what neither class
can express, or this package cannot, is refused by name.
"""

from typing import Any, Literal

from pydantic import ValidationError

from megapipe.errors import ConfigError
from megapipe.model.gpt.config import ModelConfig

Family = Literal["gpt2", "llama"]

_GPT2_ACTIVATIONS: dict[str, Literal["gelu", "gelu_tanh"]] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
}
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


def config_from_hf(hf_config: Any) -> ModelConfig:
    """The resolved model of a `GPT2Config` or `LlamaConfig`, in fp32.

    Raises:
        ConfigError: another architecture, or a feature that this package does not have.
    """
    model_type = getattr(hf_config, "model_type", type(hf_config).__name__)
    if model_type not in ("gpt2", "llama"):
        raise ConfigError(
            f"model_type {model_type!r} is not supported; supported are gpt2 and llama"
        )
    try:
        read = _from_gpt2_config if model_type == "gpt2" else _from_llama_config
        model = read(hf_config)
    except ValidationError as error:
        first = error.errors()[0]
        key = first["loc"][0]
        raise ConfigError(
            f"the {model_type} config gives model.{key} = {first['input']!r}: {first['msg']}"
        ) from error
    hf_family(model)
    return model


def config_to_hf(model: ModelConfig, **extra: Any) -> Any:
    """The `GPT2Config` or `LlamaConfig` of a resolved model.

    Args:
        model: the resolved model. Llama has no dropout outside its attention, so none is set.
        extra: further keys for the class, such as `bos_token_id` (default: no special tokens).

    Raises:
        ConfigError: neither class can express the model.
    """
    common = {
        "vocab_size": model.vocab_size,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tied_embeddings,
        "dtype": _DTYPES[model.dtype],
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if hf_family(model) == "gpt2":
        from transformers import GPT2Config

        gpt2 = {
            "n_positions": model.max_positions,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.ffn_hidden,
            "activation_function": "gelu" if model.activation == "gelu" else "gelu_new",
            "resid_pdrop": model.dropout,
            "embd_pdrop": model.dropout,
            "attn_pdrop": model.dropout,
            "layer_norm_epsilon": model.norm_eps,
        }
        return GPT2Config(**(common | gpt2 | extra))
    from transformers import LlamaConfig

    llama = {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "attention_bias": model.bias,
        "mlp_bias": model.bias,
    }
    return LlamaConfig(**(common | llama | extra))


def hf_family(model: ModelConfig) -> Family:
    """Which Hugging Face class expresses a resolved model.

    Raises:
        ConfigError: neither does, or the model has unresolved sizes.
    """
    for field in ("kv_heads", "head_dim", "ffn_hidden", "vocab_size", "max_positions"):
        if getattr(model, field) is None:
            raise ConfigError(f"model.{field} is not set; pass a resolved model")
    family: Family = "gpt2" if model.positions == "learned" else "llama"
    fits: list[tuple[str, Any, tuple[Any, ...]]]
    if family == "gpt2":
        fits = [
            ("norm", model.norm, ("layernorm",)),
            ("activation", model.activation, ("gelu", "gelu_tanh")),
            ("bias", model.bias, (True,)),
            ("kv_heads", model.kv_heads, (model.heads,)),
            ("heads x model.head_dim", model.heads * (model.head_dim or 0), (model.hidden,)),
        ]
    else:
        fits = [
            ("norm", model.norm, ("rmsnorm",)),
            ("activation", model.activation, ("swiglu",)),
            ("heads % model.kv_heads", model.heads % (model.kv_heads or 1), (0,)),
            ("hidden % model.heads", model.hidden % model.heads, (0,)),
        ]
    for field, value, allowed in fits:
        if value not in allowed:
            raise ConfigError(
                f"model.{field} = {value} cannot be expressed by Hugging Face's {family} class "
                f"(chosen by model.positions = {model.positions}); "
                f"it needs {' or '.join(str(choice) for choice in allowed)}"
            )
    return family


def _from_gpt2_config(hf_config: Any) -> ModelConfig:
    activation = _GPT2_ACTIVATIONS.get(hf_config.activation_function)
    if activation is None:
        raise ConfigError(
            f"activation_function {hf_config.activation_function!r} is not supported for gpt2; "
            f"supported are {', '.join(_GPT2_ACTIVATIONS)}"
        )
    _require(hf_config, "scale_attn_weights", True)
    _require(hf_config, "scale_attn_by_inverse_layer_idx", False)
    _require(hf_config, "add_cross_attention", False)
    _require(hf_config, "embd_pdrop", hf_config.resid_pdrop, "as resid_pdrop")
    _require(hf_config, "attn_pdrop", hf_config.resid_pdrop, "as resid_pdrop")
    return ModelConfig(
        layers=hf_config.n_layer,
        hidden=hf_config.n_embd,
        heads=hf_config.n_head,
        kv_heads=hf_config.n_head,
        head_dim=hf_config.n_embd // hf_config.n_head,
        ffn_hidden=hf_config.n_inner or 4 * hf_config.n_embd,
        vocab_size=hf_config.vocab_size,
        max_positions=hf_config.n_positions,
        norm="layernorm",
        norm_eps=hf_config.layer_norm_epsilon,
        positions="learned",
        activation=activation,
        bias=True,
        tied_embeddings=hf_config.tie_word_embeddings,
        dropout=hf_config.resid_pdrop,
        init_std=hf_config.initializer_range,
    )


def _from_llama_config(hf_config: Any) -> ModelConfig:
    rope = hf_config.rope_parameters
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(
            f"rope_parameters {rope} are not supported for llama; "
            "supported is rope_type 'default' over the whole head, without scaling"
        )
    if hf_config.hidden_act not in ("silu", "swish"):
        raise ConfigError(
            f"hidden_act {hf_config.hidden_act!r} is not supported for llama; supported is silu"
        )
    _require(hf_config, "mlp_bias", hf_config.attention_bias, "as attention_bias")
    _require(hf_config, "attention_dropout", 0)
    return ModelConfig(
        layers=hf_config.num_hidden_layers,
        hidden=hf_config.hidden_size,
        heads=hf_config.num_attention_heads,
        kv_heads=hf_config.num_key_value_heads,
        head_dim=hf_config.head_dim,
        ffn_hidden=hf_config.intermediate_size,
        vocab_size=hf_config.vocab_size,
        max_positions=hf_config.max_position_embeddings,
        norm="rmsnorm",
        norm_eps=hf_config.rms_norm_eps,
        positions="rotary",
        rotary_base=rope["rope_theta"],
        activation="swiglu",
        bias=hf_config.attention_bias,
        tied_embeddings=hf_config.tie_word_embeddings,
        init_std=hf_config.initializer_range,
    )


def _require(hf_config: Any, key: str, wanted: Any, reason: str = "") -> None:
    value = getattr(hf_config, key)
    if value != wanted:
        must = f"{wanted}, {reason}" if reason else f"{wanted}"
        raise ConfigError(
            f"{key} = {value} is not supported for {hf_config.model_type}; it must be {must}"
        )
