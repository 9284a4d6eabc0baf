"""Modifiers of attention scores in a layer (scale, soft cap, window, ALiBi). Needs no torch."""

from megapipe.config.model import ModelConfig
from megapipe.ops.scores import ScoreModifiers, alibi_slopes


def scores_of(model: ModelConfig, layer: int, tp_index: int, tp: int) -> ScoreModifiers:
    """Return a layer's score modifiers for the heads of one of `tp` tensor-parallel ranks."""
    slopes = alibi_slopes(model.heads) if model.positions == "alibi" else None
    window = model.window_of(layer)
    scores = ScoreModifiers(model.attention_scale, model.attention_softcap, slopes, window)
    return scores.of_heads(tp_index, tp)
