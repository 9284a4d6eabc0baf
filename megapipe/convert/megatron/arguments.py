"""Conversion of the arguments that Megatron-LM stores in a checkpoint to a model configuration.

A value that megapipe cannot express is an error that names the argument. If an argument is missing
because an older version lacked it, the older behaviour is assumed. The module needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError

_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}
_LLAMA3 = {"original_positions": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Values that Megatron-LM's ``--use-rope-scaling`` fixes; only the factor can be set."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "num_moe_experts": (None, 0),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_type": (None,),
    "mtp_num_layers": (None, 0),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "is_hybrid_model": (False,),
    "hybrid_override_pattern": (None,),
    "use_legacy_models": (False,),
    "add_position_embedding": (True,),
    "apply_residual_connection_post_layernorm": (False,),
    "rotary_interleaved": (False,),
    "no_rope_freq": (None,),
    "squared_relu": (False,),
    "quick_geglu": (False,),
    "openai_gelu": (False,),
    "onnx_safe": (None, False),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "qk_l2_norm": (False,),
    "softmax_type": ("vanilla",),
    "attention_output_gate": (False,),
    "use_kitchen_attention": (False,),
    "use_mup": (False,),
}
"""Arguments without a key in megapipe, each with the values that do not change the model."""


def model_of_args(args: Mapping[str, Any]) -> ModelConfig:
    """Return the resolved model that arguments describe, in fp32, with the padded vocabulary.

    Raises:
        ConfigError: an argument is missing, or a value cannot be expressed.
    """
    for name, values in _NEUTRAL.items():
        if name in args and args[name] not in values:
            raise _refused(name, args[name], str(values[0]))
    try:
        model = ModelConfig.model_validate(_fields(_Given(args)))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"the arguments give model.{first['loc'][0]} = {first['input']!r}: {first['msg']}"
        ) from None
    except (TypeError, ValueError) as error:  # for example, a window that is not a pair
        raise ConfigError(f"the arguments do not describe a model: {error}") from None
    return model.resolved(vocab_size=None, sequence_length=0)


class _Given:
    """Stored arguments; an argument may have several names."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first value of the arguments `names` that is not None, else `default`."""
        found = (self._args[name] for name in names if self._args.get(name) is not None)
        return next(found, default)

    def need(self, *names: str) -> Any:
        """Return the first value of the arguments `names` that is not None. Raises ConfigError if
        all are None."""
        value = self.get(*names)
        if value is None:
            raise ConfigError(f"the stored arguments lack {' or '.join(names)}")
        return value


def _fields(given: _Given) -> dict[str, Any]:
    return {
        **_sizes(given),
        **_norms(given),
        **_positions(given),
        **_attention(given),
        "activation": _activation(given),
        "tied_embeddings": not given.get("untie_embeddings_and_output_weights", default=False),
        "dropout": _dropout(given),
        "init_std": given.get("init_method_std", default=0.02),
    }


def _sizes(given: _Given) -> dict[str, Any]:
    heads = given.need("num_attention_heads")
    grouped = given.get("group_query_attention", default=False)
    return {
        "layers": given.need("num_layers", "encoder_num_layers"),
        "hidden": given.need("hidden_size"),
        "heads": heads,
        "kv_heads": given.need("num_query_groups") if grouped else heads,
        "head_dim": given.get("kv_channels"),
        "ffn_hidden": given.need("ffn_hidden_size"),
        "vocab_size": given.need("padded_vocab_size"),
        "max_positions": given.need("max_position_embeddings", "seq_length"),
    }


def _norms(given: _Given) -> dict[str, Any]:
    kind = given.get("normalization", default="LayerNorm")
    if kind not in _NORMS:
        raise _refused("normalization", kind, " or ".join(_NORMS))
    biases = given.get("add_bias_linear", default=True)
    one_plus = given.get("apply_layernorm_1p", "layernorm_zero_centered_gamma", default=False)
    qk_norm = given.get("qk_layernorm", default=False)
    if kind == "LayerNorm":
        if not biases:
            raise _refused("add_bias_linear", biases, "True, where normalization is LayerNorm")
        for name, value in (("apply_layernorm_1p", one_plus), ("qk_layernorm", qk_norm)):
            if value:
                raise _refused(name, value, "False, where normalization is LayerNorm")
    return {
        "norm": _NORMS[kind],
        "norm_eps": given.get("norm_epsilon", "layernorm_epsilon", default=1e-5),
        "zero_centered_norm": one_plus,
        "bias": biases,
        "qkv_bias": True if given.get("add_qkv_bias", default=False) else None,
        "qk_norm": qk_norm,
    }


def _positions(given: _Given) -> dict[str, Any]:
    kind = given.get("position_embedding_type", default="learned_absolute")
    if given.get("use_rotary_position_embeddings", default=False):
        kind = "rope"
    if kind not in _POSITIONS:
        raise _refused("position_embedding_type", kind, " or ".join(_POSITIONS))
    if kind != "rope":
        return {"positions": _POSITIONS[kind]}
    rope = {
        "base": given.get("rotary_base", default=10000),
        "percent": given.get("rotary_percent", default=1.0),
    }
    stretched = given.get("rotary_seq_len_interpolation_factor", default=1)
    if given.get("use_rope_scaling", default=False):
        if stretched != 1:
            name = "rotary_seq_len_interpolation_factor"
            raise _refused(name, stretched, "None, where use_rope_scaling is True")
        factor = given.get("rope_scaling_factor", default=8.0)
        rope |= {"scaling": "llama3", "factor": factor, **_LLAMA3}
    elif stretched != 1:
        rope |= {"scaling": "linear", "factor": stretched}
    return {"positions": "rotary", "rope": rope}


def _attention(given: _Given) -> dict[str, Any]:
    fields: dict[str, Any] = {"attention_scale": given.get("softmax_scale")}
    before, after = given.get("window_size", default=(-1, 0))
    if before < 0:
        return fields
    if after != 0:
        raise _refused("window_size", (before, after), "(n, 0)")
    every = given.get("window_attn_skip_freq")
    if isinstance(every, Sequence):
        every = _period(every)
    return {**fields, "sliding_window": before + 1, "full_attention_every": every}


def _period(pattern: Sequence[int]) -> int | None:
    """Return n if exactly every n-th layer has full attention, None if no layer has. `pattern` has
    a number per layer, 0 for full attention."""
    if all(pattern):
        return None
    every = list(pattern).index(0) + 1
    if [int((layer + 1) % every != 0) for layer in range(len(pattern))] != list(pattern):
        raise _refused(
            "window_attn_skip_freq", list(pattern), "0 at every n-th layer and only there"
        )
    return every


def _activation(given: _Given) -> str:
    """Return the activation. For GELU it is the tanh form if Megatron-LM fuses bias and GELU."""
    if given.get("swiglu", default=False):
        return "swiglu"
    biases = given.get("add_bias_linear", default=True)
    fused = biases and given.get("bias_gelu_fusion", default=True)
    return "gelu_tanh" if fused else "gelu"


def _dropout(given: _Given) -> float:
    hidden, attention = (
        given.get(name, default=0.1) for name in ("hidden_dropout", "attention_dropout")
    )
    if hidden != attention:
        raise _refused("attention_dropout", attention, f"{hidden}, as hidden_dropout")
    return hidden


def _refused(name: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(
        f"argument {name} = {value!r} cannot be expressed in megapipe: expected {wanted}"
    )
