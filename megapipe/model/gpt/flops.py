"""Model FLOPs: what the mathematics of a step needs, whatever the layout.

A multiplication and an addition are two FLOPs, only matrix products are counted, and the backward
costs twice the forward. Attention counts the full s x s scores although the causal mask needs
half of them: the convention of the PaLM paper's MFU (2204.02311, appendix B), under which a token
costs 6N + 12 L h s with N the parameters in matrix products. Looking up an embedding is not a
matrix product, padding of the vocabulary and recomputation are not model FLOPs.
"""

from megapipe.config.model import ModelConfig
from megapipe.model.gpt.moe.layers import GATES
from megapipe.model.gpt.parameters import known


def layer_flops(
    model: ModelConfig, sequence_length: int, window: int | None = None, *, experts: int = 0
) -> int:
    """FLOPs of one layer's forward, per token, which sees `window` positions if not all; of so many
    `experts` those that a token is sent to, none of them dropped."""
    head_dim = known(model.head_dim)
    queries = model.heads * head_dim
    qkv = queries + 2 * known(model.kv_heads) * head_dim
    matrices, moe = 3 if model.gated else 2, model.moe
    rows = matrices * known(model.ffn_hidden)
    if experts:
        rows = matrices * (moe.top_k * known(moe.ffn) + (moe.shared or 0))
        rows += experts + GATES[moe.shared_gate]
    weights = model.hidden * (qkv + queries + rows)
    seen = sequence_length if window is None else min(sequence_length, window)
    scores = 2 * seen * queries  # q k^T and its product with v
    return 2 * (weights + scores)


def row_flops(model: ModelConfig) -> int:
    """FLOPs of the forward of an expert, of one of its rows."""
    return 2 * model.hidden * (3 if model.gated else 2) * known(model.moe.ffn)


def causal_flops(model: ModelConfig, length: int) -> int:
    """FLOPs of one layer's forward on the first `length` tokens of a sequence, on average.

    Unlike :func:`layer_flops`, which counts whole score matrices, this counts the positions that
    each token attends to, itself and all before it, or those in the layer's window.
    """
    linear = layer_flops(model, 0)
    per_position = layer_flops(model, 1) - linear
    seen = 0
    for layer in range(model.layers):
        full = min(length, model.window_of(layer) or length)  # the first tokens see fewer
        seen += full * (full + 1) // 2 + (length - full) * full
    return length * linear + per_position * seen // model.layers


def head_flops(model: ModelConfig) -> int:
    """FLOPs of the head's forward, per token."""
    return 2 * model.hidden * known(model.vocab_size)
