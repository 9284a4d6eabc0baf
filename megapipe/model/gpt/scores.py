"""Changes that the attention of a layer makes to its scores. No torch."""

from megapipe.config.model import ModelConfig
from megapipe.ops.scores import ScoreModifiers, alibi_slopes


def scores_of(model: ModelConfig, layer: int, tp_index: int, tp: int) -> ScoreModifiers:
    """Those of a layer, of the heads of one of `tp` tensor-parallel ranks."""
    slopes = alibi_slopes(model.heads) if model.positions == "alibi" else None
    window = model.window_of(layer)
    scores = ScoreModifiers(model.attention_scale, model.attention_softcap, slopes, window)
    return scores.of_heads(tp_index, tp)
