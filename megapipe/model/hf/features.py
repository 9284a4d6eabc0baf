"""Which features a transformers class has: those that need its attention to be megapipe's."""

from __future__ import annotations

from megapipe.model.hf.calls import LayerCalls
from megapipe.model.hf.outline import Outline
from megapipe.model.interface import Feature

ATTENDED: tuple[Feature, ...] = ("context", "document_mask", "kv_cache", "slices")
"""Features that a class has if megapipe's kernels compute its attention."""
SHORT = 8
"""Position up to which position embeddings are compared where samples consist of documents."""


def why_not(feature: Feature, outline: Outline, calls: LayerCalls, length: int) -> str:
    """Say why a class does not have one of the features :data:`ATTENDED`; "" if it has it.

    `length`: number of positions of a sequence.
    """
    if not any(outline.attention):
        return outline.own_attention or "its attention is not that of transformers' interface"
    for layer, own in enumerate(outline.attention):
        if own is None:
            return (
                f"layer {layer} passes values between positions in another way than causal "
                "attention"
            )
        if feature == "context" and own.scores.among(length).window is not None:
            return f"layer {layer} sees a window of {own.scores.window} positions"
    if feature == "context" and outline.draws:
        return "it draws random numbers in training, for example for dropout"
    if not calls.follows_positions(SHORT if feature == "document_mask" else length - 1):
        return "its position embeddings depend on more than a token's own position"
    return ""
