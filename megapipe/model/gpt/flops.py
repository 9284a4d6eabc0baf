"""Model FLOPs: the FLOPs that a step needs mathematically, in any layout.

A multiplication and an addition are two FLOPs, only matrix products are counted, and the backward
costs twice the forward. As for the PaLM paper's MFU (2204.02311, appendix B), attention counts the
full s x s scores, although a causal mask needs half of them. A token then costs 6N + 12 L h s,
where N is the number of parameters in matrix products. Embedding lookups, padding of the vocabulary
and recomputation do not count.
"""

from megapipe.config.model import ModelConfig
from megapipe.model.gpt.moe.layers import GATES
from megapipe.model.gpt.parameters import known
from megapipe.ops.scores import visible_scores


def layer_flops(
    model: ModelConfig, sequence_length: int, window: int | None = None, *, experts: int = 0
) -> int:
    """Return forward FLOPs per token of a layer. `window`: positions that a token sees; default:
    all. `experts`: number of routed experts, 0 in a dense layer; only `top_k` of them count."""
    head_dim = known(model.head_dim)
    queries = model.heads * head_dim
    qkv = queries + 2 * known(model.kv_heads) * head_dim
    matrices, moe = 3 if model.gated else 2, model.moe
    rows = matrices * known(model.ffn_hidden)
    if experts:
        rows = matrices * (moe.top_k * known(moe.expert_ffn_hidden) + (moe.shared_ffn_hidden or 0))
        rows += experts + GATES[moe.shared_gate]
    weights = model.hidden * (qkv + queries + rows)
    seen = sequence_length if window is None else min(sequence_length, window)
    scores = 2 * seen * queries  # q k^T and its product with v
    return 2 * (weights + scores)


def row_flops(model: ModelConfig) -> int:
    """Return the forward FLOPs of one row (a token in one expert)."""
    return 2 * model.hidden * (3 if model.gated else 2) * known(model.moe.expert_ffn_hidden)


def causal_flops(model: ModelConfig, length: int) -> int:
    """Return a layer's forward FLOPs (mean over layers) on the first `length` tokens of a sequence.

    A score counts only if the token attends to the position: to itself and earlier positions,
    within the layer's sliding window. :func:`layer_flops` counts whole score matrices instead.
    """
    linear = layer_flops(model, 0)
    per_position = layer_flops(model, 1) - linear
    seen = sum(visible_scores(length, model.window_of(layer)) for layer in range(model.layers))
    return length * linear + per_position * seen // model.layers


def head_flops(model: ModelConfig) -> int:
    """Return the head's forward FLOPs per token."""
    return 2 * model.hidden * known(model.vocab_size)
