"""Sections of a configuration by the names that cases of the parity matrix have for them."""

from __future__ import annotations

from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "activation": "swiglu",
        "bias": False,
        "ffn_hidden": 48,
    },
    "own norm": {"norm": "tests.parity.own_norm:mean_size"},
    "mixed": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "rotary_scaling": "llama3",
        "rotary_factor": 8.0,
        "rotary_original_positions": 12,
        "rotary_turns_low": 0.05,
        "rotary_turns_high": 1.5,
        "activation": "swiglu",
        "ffn_hidden": 24,
    },
    "qwen": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "activation": "swiglu",
        "bias": False,
        "qkv_bias": True,
        "qk_norm": True,
        "head_dim": 8,
        "ffn_hidden": 24,
        "rotary_share": 0.5,
        "rotary_scaling": "yarn",
        "rotary_factor": 4.0,
        "rotary_original_positions": 8,
        "rotary_turns_low": 0.1,
        "rotary_turns_high": 0.7,
        "rotary_attention_factor": 1.3,
    },
    "gelu": {
        "activation": "gelu",
        "positions": "rotary",
        "rotary_scaling": "linear",
        "rotary_factor": 3.0,
        "bias": False,
    },
    "neox": {
        "activation": "gelu",
        "positions": "rotary",
        "rotary_share": 0.5,
        "bias": False,
        "parallel_residual": True,
    },
    "bloom": {"positions": "alibi", "embedding_norm": True},
    "capped": {
        "norm": "rmsnorm",
        "positions": "alibi",
        "bias": False,
        "attention_scale": 0.4,
        "attention_softcap": 2.0,
    },
    "gemma": {
        "norm": "rmsnorm",
        "norm_offset": True,
        "post_norms": True,
        "positions": "rotary",
        "rotary_local_base": 100.0,
        "activation": "geglu_tanh",
        "bias": False,
        "ffn_hidden": 24,
        "embedding_scale": 4.0,
        "attention_scale": 0.4,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "window": 3,
        "full_attention_every": 2,
    },
}


CONTEXTS: dict[str, dict[str, Any]] = {
    "ring": {"travels": "keys"},
    "striped": {"order": "striped"},
    "contiguous": {"order": "contiguous", "travels": "keys"},
    "double ring": {"plan": "double_ring", "inner": 2},
    "helpers": {"plan": "helpers", "order": "contiguous"},
    "teams": {"plan": "teams", "team": 2},
    "all_gather": {"plan": "all_gather"},
    "queries travel": {"travels": "queries"},
    "ulysses": {},
    "usp": {"ulysses": 2},
    "usp, context first": {"ulysses": 2, "ranks": "context_first"},
    "own": {"plan": "tests.parity.own_code:backwards_ring"},
}
"""The section by name; of ulysses, all ranks of cp split heads."""


MOE: dict[str, dict[str, Any]] = {
    "top 2": {"experts": 4, "ffn": 12, "balance": 0.3, "z": 0.05},
    "sixteen": {
        "experts": 16,
        "ffn": 8,
        "shared": 8,
        "balance": 0.3,
        "z": 0.05,
        "bias_rate": 0.02,
    },
    "top 1, capacity 1": {
        "experts": 4,
        "top_k": 1,
        "normalise": False,
        "capacity": 1.0,
        "balance": 0.5,
        "every": 2,
        "dense_layers": [1],
    },
    "capacity, choice": {
        "experts": 6,
        "capacity": 0.8,
        "balance": 0.2,
        "balance_choices": "first",
    },
    "capacity, position": {
        "experts": 4,
        "ffn": 20,
        "capacity": 1.1,
        "drop": "position",
        "normalise": False,
        "balance_scope": "microbatch",
    },
    "capacity, score": {"experts": 3, "capacity": 0.6, "drop": "score", "z": 0.1},
    "groups": {
        "experts": 6,
        "top_k": 3,
        "ffn": 8,
        "scores": "sigmoid",
        "scale": 1.7,
        "groups": 3,
        "group_top_k": 2,
        "dense_first": 1,
        "shared": 12,
        "balance": 0.4,
        "bias_rate": 0.03,
    },
    "step": {
        "experts": 4,
        "capacity": 0.9,
        "drop": "position",
        "balance": 0.4,
        "balance_scope": "step",
        "bias_rate": 0.02,
    },
    "step, first": {
        "experts": 6,
        "top_k": 3,
        "ffn": 8,
        "scores": "sigmoid",
        "balance": 0.4,
        "balance_scope": "step",
        "balance_choices": "first",
        "bias_rate": 0.02,
    },
    "random": {
        "experts": 4,
        "capacity": 0.9,
        "drop": "score",
        "scale": 1.5,
        "jitter": 0.3,
        "second": "random",
        "balance": 0.2,
    },
    "gshard": {
        "experts": 4,
        "capacity": 0.9,
        "second": "random",
        "balance": 0.4,
        "balance_choices": "first",
    },
    "sliced": {
        "experts": 4,
        "capacity": 0.9,
        "drop": "position",
        "jitter": 0.3,
        "second": "random",
        "balance": 0.4,
        "balance_scope": "microbatch",
        "balance_choices": "first",
        "z": 0.05,
    },
    "every second": {
        "experts": [4, 8, 12] * 2,
        "every": 2,
        "ffn": 8,
        "shared": 8,
        "bias_rate": 0.02,
        "balance_scope": "step",
    },
    "shared, gated": {"experts": 4, "shared": 20, "shared_gate": "sigmoid", "z": 0.03},
    "residual": {"experts": 4, "shared": 16, "shared_gate": "softmax", "scores": "sigmoid"},
    "pyramid": {
        "experts": [4, 8, 12] * 4,
        "top_k": 1,
        "normalise": False,
        "ffn": 12,
        "shared": 16,
        "shared_gate": "softmax",
        "balance": 0.4,
        "z": 0.05,
    },
    "pyramid, biased": {
        "experts": [4, 12, 8] * 4,
        "ffn": 8,
        "scores": "sigmoid",
        "groups": 2,
        "group_top_k": 1,
        "dense_first": 1,
        "capacity": 1.2,
        "drop": "position",
        "balance": 0.4,
        "balance_scope": "step",
        "bias_rate": 0.02,
    },
}
"""The section model.moe by name. Coefficients are large, so that an error in a term is seen. A list
has numbers for more layers than a case has."""


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "keep": {},
    "stage": {"policy": "stage"},
    "full": {"policy": "full"},
    "full, two together": {"policy": "full", "span": 2, "offload": ["norm"]},
    "full, attention kept": {"policy": "full", "keep_attention": True},
    "selective, attention kept": {"policy": "selective", "keep_attention": True},
    "stage, attention kept": {"policy": "stage", "keep_attention": True},
    "selective": {"policy": "selective"},
    "selective, one block": {"policy": "selective", "blocks": 1, "modules": ["attention"]},
    "offload": {"offload": ["norm", "attention", "mlp_activation"]},
    "of each some": {
        "policy": "selective",
        "modules": ["norm", "mlp_activation"],
        "offload": ["norm", "attention"],
    },
    "experts again": {"policy": "selective", "modules": ["norm", "experts"]},
}
OF_ALL_MODELS = [name for name in ACTIVATIONS if name != "experts again"]
"""Those of layers without experts, too."""


ADAPTED: dict[str, dict[str, Any]] = {
    "all": {"rank": 3, "targets": ["all"]},
    "some": {"rank": 2, "targets": ["attention.q", "attention.v", "mlp.down"]},
    "heads together": {"rank": 5, "targets": ["attention.qkv", "attention.out"]},
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "static": {},
    "changing": {"policy": "balance", "slots": 2, "replan": 1},
    "one slot": {"policy": "balance", "slots": 1, "replan": 1},
    "every second step": {"policy": "balance", "slots": 2, "replan": 2},
    "shadows": {"policy": "shadow", "slots": 2, "replan": 1},
    "migrating": {"policy": "migrate", "replan": 1},
}
"""Which ranks have which experts. Those that migrate get a pool of drawn owners."""
