"""Checks that the sizes of a GPT fit each other. Each error says what would be right."""

from types import SimpleNamespace

from megapipe.config.model import ModelConfig
from megapipe.config.unused_keys import check_effects
from megapipe.errors import ConfigError
from megapipe.model.gpt.moe.checks import check_experts
from megapipe.model.interface import RunShape
from megapipe.model.user_norm import load_norm
from megapipe.text import divisors_hint


def check(model: ModelConfig, conditions: RunShape) -> None:
    """Check the sizes of a model; raise :class:`ConfigError` for the first error."""
    heads, kv_heads, tp = model.heads, model.kv_heads or model.heads, conditions.tp
    if heads % kv_heads:
        raise ConfigError(
            f"model.heads={heads} is not divisible by model.kv_heads={kv_heads}: "
            f"{divisors_hint('kv_heads', heads, kv_heads)}"
        )
    for key, size in (("heads", heads), ("kv_heads", kv_heads), ("ffn_hidden", model.ffn_hidden)):
        if size is not None and size % tp:
            raise ConfigError(
                f"model.{key}={size} is not divisible by parallel.tp={tp}: "
                f"{divisors_hint('tp', size, tp)}"
            )
    check_effects(SimpleNamespace(model=model), "model")
    check_experts(model)
    if model.own_norm:
        load_norm(model.norm)
    if model.positions == "rotary":
        _check_rotary(model)
    for key, is_set in (
        ("sliding_window", model.sliding_window is not None),
        ("attention_softcap", model.attention_softcap is not None),
        ("positions=alibi", model.positions == "alibi"),
    ):
        if is_set and model.dropout:
            raise ConfigError(f"model.{key} needs model.dropout=0, not {model.dropout:g}")
    length = conditions.sequence_length
    if model.positions == "learned" and model.max_positions and length > model.max_positions:
        raise ConfigError(
            f"train.sequence_length={length} is longer than the position table, "
            f"model.max_positions={model.max_positions}: expected at most that"
        )
    if conditions.loss is not None and tp > 1:
        raise ConfigError(
            f"train.loss_function={conditions.loss} needs whole logits, which parallel.tp={tp} "
            "splits: expected parallel.tp=1, or train.loss_function=null"
        )
    if conditions.compile and model.dropout:
        raise ConfigError(f"kernels.compile=true needs model.dropout=0, not {model.dropout:g}")


def _check_rotary(model: ModelConfig) -> None:
    rope, width = model.rope, (model.head_dim or 0) * model.rope.percent
    if width % 2:
        percent = "" if rope.percent == 1 else f" x model.rope.percent={rope.percent:g}"
        raise ConfigError(
            f"model.head_dim={model.head_dim} (hidden / heads by default){percent} is "
            f"{'odd' if width == int(width) else f'{width:g}'}: model.positions=rotary rotates "
            "pairs of coordinates and needs an even width"
        )
    if rope.scaling in ("llama3", "yarn"):
        if rope.original_positions is None:
            raise ConfigError(
                f"model.rope.scaling={rope.scaling} needs model.rope.original_positions: the "
                "sequence length of the first training"
            )
        if rope.low_freq_factor >= rope.high_freq_factor:
            raise ConfigError(
                f"model.rope.low_freq_factor={rope.low_freq_factor:g} is not below "
                f"model.rope.high_freq_factor={rope.high_freq_factor:g}"
            )


def resolved(model: ModelConfig, vocab_size: int | None, sequence_length: int) -> ModelConfig:
    """Return the model with all defaults filled in; an unknown ``vocab_size`` stays None."""
    if model.head_dim is None and model.hidden % model.heads:
        raise ConfigError(
            f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}: "
            f"set model.head_dim, or {divisors_hint('heads', model.hidden, model.heads)}"
        )
    return model.resolved(vocab_size=vocab_size, sequence_length=sequence_length)
