"""Names of megatron-core's GPT for megapipe's tensors. Needs no torch.

megatron-core and megapipe store the values of a tensor in the same order: queries, keys and values
by group, a gate and its up projection one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

HEAD = "output_layer.weight"
LAYERS = "decoder.layers."

_OUTER = {
    "embedding.word": ("embedding.word_embeddings.",),
    "embedding.position": ("embedding.position_embeddings.",),
    "final_norm": ("decoder.final_layernorm.",),
    "head": ("output_layer.",),
}
_INNER = {
    # of separate layers; of Transformer Engine's layers, which contain the norm
    "attention_norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.qkv": ("self_attention.linear_qkv.",),
    "attention.q_norm": ("self_attention.q_layernorm.",),
    "attention.k_norm": ("self_attention.k_layernorm.",),
    "attention.out": ("self_attention.linear_proj.",),
    "mlp_norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp.up": ("mlp.linear_fc1.",),
    "mlp.down": ("mlp.linear_fc2.",),
}
_NO_WEIGHT = re.compile(
    r"(^|[./])(_extra_state|rotary_pos_emb\.inv_freq)($|[./])"
    r"|^(optimizer|chained_\d+|rng_state|rerun_state_machine_state|opt_param_scheduler)($|[./])"
)


def is_weight(name: str) -> bool:
    """Whether a tensor is a weight of the model, and not a buffer or a state of an optimizer, of a
    random generator or of Transformer Engine."""
    return not _NO_WEIGHT.search(name)


def spellings(name: str) -> Iterator[str]:
    """Yield megatron-core's possible names of a global tensor; layers count over all stages."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        yield from (f"{theirs}{kind}" for theirs in _OUTER[module])
        return
    _, number, inner = module.split(".", 2)
    yield from (f"{LAYERS}{number}.{theirs}{kind}" for theirs in _INNER[inner])
