"""Names of megatron-core's GPT, by ours. Both arrange values alike: queries, keys and values by
group, a gate and what it multiplies one after the other. No torch."""

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
    # of layers by themselves; of Transformer Engine's, which hold the norm before them
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
    """Whether a tensor is of the model's weights: no state of an optimizer, of random numbers or of
    Transformer Engine, no buffer."""
    return not _NO_WEIGHT.search(name)


def spellings(name: str) -> Iterator[str]:
    """Their names for a global tensor of ours; layers are numbered from 0 over all stages."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("layers."):
        yield from (f"{theirs}{kind}" for theirs in _OUTER[module])
        return
    _, number, inner = module.split(".", 2)
    yield from (f"{LAYERS}{number}.{theirs}{kind}" for theirs in _INNER[inner])
