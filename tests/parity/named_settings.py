"""Sections of a configuration, by the names that cases of the parity matrix use."""

from __future__ import annotations

from typing import Any

from megapipe.config.rope import RopeConfig

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "activation": "swiglu",
        "bias": False,
        "ffn_hidden": 48,
    },
    "own norm": {"norm": "tests.parity.user_norm:mean_size"},
    "mixed": {
        "norm": "rmsnorm",
        "positions": "rotary",
        "rope": RopeConfig(
            scaling="llama3",
            factor=8.0,
            original_positions=12,
            low_freq_factor=0.05,
            high_freq_factor=1.5,
        ),
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
        "rope": RopeConfig(
            percent=0.5,
            scaling="yarn",
            factor=4.0,
            original_positions=8,
            low_freq_factor=0.1,
            high_freq_factor=0.7,
            attention_factor=1.3,
        ),
    },
    "gelu": {
        "activation": "gelu",
        "positions": "rotary",
        "rope": RopeConfig(scaling="linear", factor=3.0),
        "bias": False,
    },
    "neox": {
        "activation": "gelu",
        "positions": "rotary",
        "rope": RopeConfig(percent=0.5),
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
        "zero_centered_norm": True,
        "post_norms": True,
        "positions": "rotary",
        "rope": RopeConfig(local_base=100.0),
        "activation": "geglu_tanh",
        "bias": False,
        "ffn_hidden": 24,
        "embedding_scale": 4.0,
        "attention_scale": 0.4,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
        "sliding_window": 3,
        "full_attention_every": 2,
    },
}


CONTEXTS: dict[str, dict[str, Any]] = {
    "ring": {"backward_circulates": "keys"},
    "striped": {"position_split": "striped"},
    "contiguous": {"position_split": "contiguous", "backward_circulates": "keys"},
    "double ring": {"algorithm": "double_ring", "inner_ring_size": 2},
    "helpers": {"algorithm": "helpers", "position_split": "contiguous"},
    "teams": {"algorithm": "teams", "team_size": 2},
    "all_gather": {"algorithm": "all_gather"},
    "queries travel": {"backward_circulates": "queries"},
    "ulysses": {},
    "usp": {"ulysses": 2},
    "usp, context first": {"ulysses": 2, "rank_order": "context_first"},
    "own": {"algorithm": "tests.parity.user_code_samples:backwards_ring"},
}
"""The section context by name; under ulysses all ranks of cp split heads."""


MOE: dict[str, dict[str, Any]] = {
    "top 2": {
        "num_experts": 4,
        "expert_ffn_hidden": 12,
        "aux_loss_coeff": 0.3,
        "z_loss_coeff": 0.05,
    },
    "sixteen": {
        "num_experts": 16,
        "expert_ffn_hidden": 8,
        "shared_ffn_hidden": 8,
        "aux_loss_coeff": 0.3,
        "z_loss_coeff": 0.05,
        "bias_update_rate": 0.02,
    },
    "top 1, capacity 1": {
        "num_experts": 4,
        "top_k": 1,
        "norm_topk_prob": False,
        "capacity_factor": 1.0,
        "aux_loss_coeff": 0.5,
        "layer_freq": 2,
        "dense_layers": [1],
    },
    "capacity, choice": {
        "num_experts": 6,
        "capacity_factor": 0.8,
        "aux_loss_coeff": 0.2,
        "aux_loss_choices": "first",
    },
    "capacity, position": {
        "num_experts": 4,
        "expert_ffn_hidden": 20,
        "capacity_factor": 1.1,
        "drop_policy": "position",
        "norm_topk_prob": False,
        "aux_loss_scope": "microbatch",
    },
    "capacity, score": {
        "num_experts": 3,
        "capacity_factor": 0.6,
        "drop_policy": "score",
        "z_loss_coeff": 0.1,
    },
    "groups": {
        "num_experts": 6,
        "top_k": 3,
        "expert_ffn_hidden": 8,
        "score_function": "sigmoid",
        "routed_scaling_factor": 1.7,
        "num_groups": 3,
        "topk_groups": 2,
        "first_dense_layers": 1,
        "shared_ffn_hidden": 12,
        "aux_loss_coeff": 0.4,
        "bias_update_rate": 0.03,
    },
    "step": {
        "num_experts": 4,
        "capacity_factor": 0.9,
        "drop_policy": "position",
        "aux_loss_coeff": 0.4,
        "aux_loss_scope": "step",
        "bias_update_rate": 0.02,
    },
    "step, first": {
        "num_experts": 6,
        "top_k": 3,
        "expert_ffn_hidden": 8,
        "score_function": "sigmoid",
        "aux_loss_coeff": 0.4,
        "aux_loss_scope": "step",
        "aux_loss_choices": "first",
        "bias_update_rate": 0.02,
    },
    "random": {
        "num_experts": 4,
        "capacity_factor": 0.9,
        "drop_policy": "score",
        "routed_scaling_factor": 1.5,
        "jitter": 0.3,
        "second_expert": "random",
        "aux_loss_coeff": 0.2,
    },
    "gshard": {
        "num_experts": 4,
        "capacity_factor": 0.9,
        "second_expert": "random",
        "aux_loss_coeff": 0.4,
        "aux_loss_choices": "first",
    },
    "sliced": {
        "num_experts": 4,
        "capacity_factor": 0.9,
        "drop_policy": "position",
        "jitter": 0.3,
        "second_expert": "random",
        "aux_loss_coeff": 0.4,
        "aux_loss_scope": "microbatch",
        "aux_loss_choices": "first",
        "z_loss_coeff": 0.05,
    },
    "every second": {
        "num_experts": [4, 8, 12] * 2,
        "layer_freq": 2,
        "expert_ffn_hidden": 8,
        "shared_ffn_hidden": 8,
        "bias_update_rate": 0.02,
        "aux_loss_scope": "step",
    },
    "shared, gated": {
        "num_experts": 4,
        "shared_ffn_hidden": 20,
        "shared_gate": "sigmoid",
        "z_loss_coeff": 0.03,
    },
    "residual": {
        "num_experts": 4,
        "shared_ffn_hidden": 16,
        "shared_gate": "softmax",
        "score_function": "sigmoid",
    },
    "pyramid": {
        "num_experts": [4, 8, 12] * 4,
        "top_k": 1,
        "norm_topk_prob": False,
        "expert_ffn_hidden": 12,
        "shared_ffn_hidden": 16,
        "shared_gate": "softmax",
        "aux_loss_coeff": 0.4,
        "z_loss_coeff": 0.05,
    },
    "pyramid, biased": {
        "num_experts": [4, 12, 8] * 4,
        "expert_ffn_hidden": 8,
        "score_function": "sigmoid",
        "num_groups": 2,
        "topk_groups": 1,
        "first_dense_layers": 1,
        "capacity_factor": 1.2,
        "drop_policy": "position",
        "aux_loss_coeff": 0.4,
        "aux_loss_scope": "step",
        "bias_update_rate": 0.02,
    },
}
"""The section model.moe by name. Coefficients are large, so that an error in a term shows. A list
has numbers for more layers than a case has."""


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "keep": {},
    "stage": {"policy": "stage"},
    "full": {"policy": "full"},
    "full, two together": {"policy": "full", "blocks_per_recompute": 2, "offload": ["norm"]},
    "full, attention kept": {"policy": "full", "keep_attention": True},
    "selective, attention kept": {"policy": "selective", "keep_attention": True},
    "stage, attention kept": {"policy": "stage", "keep_attention": True},
    "selective": {"policy": "selective"},
    "selective, one block": {"policy": "selective", "num_blocks": 1, "modules": ["attention"]},
    "offload": {"offload": ["norm", "attention", "mlp_activation"]},
    "of each some": {
        "policy": "selective",
        "modules": ["norm", "mlp_activation"],
        "offload": ["norm", "attention"],
    },
    "experts again": {"policy": "selective", "modules": ["norm", "experts"]},
}
OF_ALL_MODELS = [name for name in ACTIVATIONS if name != "experts again"]
"""Activation policies that also apply to layers without experts."""


ADAPTED: dict[str, dict[str, Any]] = {
    "all": {"rank": 3, "targets": ["all"]},
    "some": {"rank": 2, "targets": ["attention.q", "attention.v", "mlp.down"]},
    "heads together": {"rank": 5, "targets": ["attention.qkv", "attention.out"]},
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "static": {},
    "changing": {"rebalance": "balance", "replica_slots": 2, "rebalance_every": 1},
    "one slot": {"rebalance": "balance", "replica_slots": 1, "rebalance_every": 1},
    "every second step": {"rebalance": "balance", "replica_slots": 2, "rebalance_every": 2},
    "shadows": {"rebalance": "shadow", "replica_slots": 2, "rebalance_every": 1},
    "migrating": {"rebalance": "migrate", "rebalance_every": 1},
}
"""Which ranks have which experts. Those that migrate get a pool of drawn owners."""
