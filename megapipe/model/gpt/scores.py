"""Changes that the attention of a layer makes to its scores. No torch."""

from megapipe.model.gpt.config import ModelConfig
from megapipe.ops.scores import Scores, alibi_slopes


def scores_of(model: ModelConfig, layer: int, tp_index: int, tp: int) -> Scores:
    """Those of a layer, of the heads of one of `tp` tensor-parallel ranks."""
    slopes = None
    if model.positions == "alibi":
        heads = model.heads // tp
        slopes = alibi_slopes(model.heads)[heads * tp_index : heads * (tp_index + 1)]
    return Scores(model.attention_scale, model.attention_softcap, slopes, model.window_of(layer))
