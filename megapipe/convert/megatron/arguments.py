"""Arguments that Megatron-LM stores in a checkpoint as the configuration of a model.

A value that cannot be expressed here is refused by its name. Arguments that only newer versions
have mean what leaving them out meant before. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError

_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary"}
_LLAMA3 = {"rotary_original_positions": 8192, "rotary_turns_low": 1.0, "rotary_turns_high": 4.0}
"""Under ``--use-rope-scaling`` all but the factor is fixed."""

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
"""Arguments that have no key here, with the values by which they change no result."""


def model_of_args(args: Mapping[str, Any]) -> ModelConfig:
    """The resolved model of stored arguments, in fp32, with all rows of the padded vocabulary.

    Raises:
        ConfigError: an argument is missing, or a value cannot be expressed here.
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
    except (TypeError, ValueError) as error:  # a window that is no pair, say
        raise ConfigError(f"the arguments describe no model: {error}") from None
    return model.resolved(vocab_size=None, sequence_length=0)


class _Given:
    """Stored arguments, by one of several names."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self._args = args

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these names that is there and has one."""
        found = (self._args[name] for name in names if self._args.get(name) is not None)
        return next(found, default)

    def need(self, *names: str) -> Any:
        """The same. Raises ConfigError if there is none."""
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
        "norm_offset": one_plus,
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
    fields = {
        "positions": "rotary",
        "rotary_base": given.get("rotary_base", default=10000),
        "rotary_share": given.get("rotary_percent", default=1.0),
    }
    stretched = given.get("rotary_seq_len_interpolation_factor", default=1)
    if given.get("use_rope_scaling", default=False):
        if stretched != 1:
            name = "rotary_seq_len_interpolation_factor"
            raise _refused(name, stretched, "None, where use_rope_scaling is True")
        factor = given.get("rope_scaling_factor", default=8.0)
        fields |= {"rotary_scaling": "llama3", "rotary_factor": factor, **_LLAMA3}
    elif stretched != 1:
        fields |= {"rotary_scaling": "linear", "rotary_factor": stretched}
    return fields


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
    return {**fields, "window": before + 1, "full_attention_every": every}


def _period(pattern: Sequence[int]) -> int | None:
    """How often a layer is without a window, of a list with 1 for each that has one."""
    if all(pattern):
        return None
    every = list(pattern).index(0) + 1
    if [int((layer + 1) % every != 0) for layer in range(len(pattern))] != list(pattern):
        raise _refused("window_attn_skip_freq", list(pattern), "0 at every n-th layer alone")
    return every


def _activation(given: _Given) -> str:
    """GELU is the tanh form where its fused kernel runs, which adds a bias."""
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
    return ConfigError(f"argument {name} = {value!r} cannot be expressed here; it must be {wanted}")
