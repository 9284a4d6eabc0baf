"""Model FLOPs: what the mathematics of a step needs, whatever the layout.

A multiplication and an addition are two FLOPs, only matrix products are counted, and the backward
costs twice the forward. Attention counts the full s x s scores although the causal mask needs
half of them: the convention of the PaLM paper's MFU (2204.02311, appendix B), under which a token
costs 6N + 12 L h s with N the parameters in matrix products. Looking up an embedding is not a
matrix product, padding of the vocabulary and recomputation are not model FLOPs.
"""

from megapipe.model.gpt.config import ModelConfig
from megapipe.model.gpt.parameters import known


def layer_flops(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one layer's forward, per token."""
    head_dim = known(model.head_dim)
    queries = model.heads * head_dim
    qkv = queries + 2 * known(model.kv_heads) * head_dim
    matrices = 3 if model.gated else 2
    weights = model.hidden * (qkv + queries + matrices * known(model.ffn_hidden))
    scores = 2 * sequence_length * queries  # q k^T and its product with v
    return 2 * (weights + scores)


def causal_flops(model: ModelConfig, length: int) -> int:
    """FLOPs of one layer's forward on the first `length` tokens of a sequence.

    Unlike :func:`layer_flops`, which counts whole score matrices, this
    counts the positions that each token attends to, itself and all before it.
    """
    linear = layer_flops(model, 0)
    per_position = layer_flops(model, 1) - linear
    return length * linear + per_position * (length * (length + 1) // 2)


def head_flops(model: ModelConfig) -> int:
    """FLOPs of the head's forward, per token."""
    return 2 * model.hidden * known(model.vocab_size)
