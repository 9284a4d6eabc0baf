"""Key names of version 0.1, which changed in version 0.2 and are accepted for one more release.

Every reader of a configuration or a checkpoint uses this file; other code does not know old names.
Old options of commands are in :mod:`megapipe.util.old_options`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megapipe.config.update_rules import RULES, AdamOptions

_SECTIONS = {"numbers": "health"}
"""New name of each renamed section; all keys of the section move with it."""

_KEYS = {
    "run.collect_every": "run.gc_interval",
    "run.own_code": "run.user_code",
    "model.window": "model.sliding_window",
    "model.norm_offset": "model.zero_centered_norm",
    "model.rotary_base": "model.rope.base",
    "model.rotary_local_base": "model.rope.local_base",
    "model.rotary_share": "model.rope.percent",
    "model.rotary_scaling": "model.rope.scaling",
    "model.rotary_factor": "model.rope.factor",
    "model.rotary_original_positions": "model.rope.original_positions",
    "model.rotary_turns_low": "model.rope.low_freq_factor",
    "model.rotary_turns_high": "model.rope.high_freq_factor",
    "model.rotary_attention_factor": "model.rope.attention_factor",
    "model.moe.experts": "model.moe.num_experts",
    "model.moe.ffn": "model.moe.expert_ffn_hidden",
    "model.moe.dense_first": "model.moe.first_dense_layers",
    "model.moe.every": "model.moe.layer_freq",
    "model.moe.shared": "model.moe.shared_ffn_hidden",
    "model.moe.scores": "model.moe.score_function",
    "model.moe.normalise": "model.moe.norm_topk_prob",
    "model.moe.scale": "model.moe.routed_scaling_factor",
    "model.moe.groups": "model.moe.num_groups",
    "model.moe.group_top_k": "model.moe.topk_groups",
    "model.moe.second": "model.moe.second_expert",
    "model.moe.balance": "model.moe.aux_loss_coeff",
    "model.moe.balance_scope": "model.moe.aux_loss_scope",
    "model.moe.balance_choices": "model.moe.aux_loss_choices",
    "model.moe.bias_rate": "model.moe.bias_update_rate",
    "model.moe.z": "model.moe.z_loss_coeff",
    "model.moe.capacity": "model.moe.capacity_factor",
    "model.moe.drop": "model.moe.drop_policy",
    "parallel.layouts": "parallel.elastic_layouts",
    "parallel.per_node": "parallel.ranks_per_node",
    "parallel.node_gb_s": "plan.intra_node_gb_s",
    "parallel.network_gb_s": "plan.inter_node_gb_s",
    "parallel.latency_us": "plan.link_latency_us",
    "context.plan": "context.algorithm",
    "context.order": "context.position_split",
    "context.inner": "context.inner_ring_size",
    "context.team": "context.team_size",
    "context.travels": "context.backward_circulates",
    "context.ranks": "context.rank_order",
    "experts.node": "experts.ranks_per_node",
    "experts.chunks": "experts.overlap_chunks",
    "experts.pad": "experts.pad_to_capacity",
    "experts.codec": "experts.wire_dtype",
    "experts.topology": "experts.link_bandwidths",
    "experts.policy": "experts.rebalance",
    "experts.pool": "experts.rebalance_pool",
    "experts.slots": "experts.replica_slots",
    "experts.replan": "experts.rebalance_every",
    "pipeline.group": "pipeline.options.microbatch_group_size",
    "pipeline.slices": "pipeline.sequence_slices",
    "pipeline.slice_overhead": "pipeline.options.slice_overhead_tokens",
    "pipeline.slice_attention": "pipeline.slice_attention_cost",
    "pipeline.pairs": "pipeline.options.chimera_pairs",
    "pipeline.replicas": "pipeline.options.ranks_per_stage",
    "pipeline.advance": "pipeline.options.extra_warmup",
    "pipeline.memory_limit": "pipeline.activation_limit",
    "pipeline.weights": "pipeline.weight_versions",
    "pipeline.horizon": "pipeline.prediction_horizon",
    "pipeline.correction": "pipeline.velocity_decay",
    "pipeline.layout": "pipeline.stage_layout",
    "pipeline.channels": "pipeline.transport",
    "pipeline.receive_ahead": "pipeline.recv_prefetch",
    "pipeline.channel_ctas": "pipeline.p2p_max_ctas",
    "activations.span": "activations.blocks_per_recompute",
    "activations.blocks": "activations.num_blocks",
    "data.samples": "data.sample_format",
    "data.mask_document_ends": "data.eod_mask_loss",
    "data.reset_positions": "data.reset_position_ids",
    "data.train_on": "data.loss_turns",
    "data.workers": "data.tokenizer_workers",
    "optimizer.beta1": "optimizer.options.betas",
    "optimizer.beta2": "optimizer.options.betas",
    "optimizer.eps": "optimizer.options.eps",
    "optimizer.momentum": "optimizer.options.momentum",
    "optimizer.momentum_decay": "optimizer.options.momentum_decay",
    "optimizer.nesterov": "optimizer.options.nesterov",
    "optimizer.trust_coefficient": "optimizer.options.trust_coefficient",
    "optimizer.muon_adjust": "optimizer.options.adjust_lr_fn",
    "optimizer.muon_split": "optimizer.options.split_qkv",
    "optimizer.adamw_lr_scale": "optimizer.options.adamw_lr_scale",
    "optimizer.clip": "optimizer.max_grad_norm",
    "optimizer.shard_size": "optimizer.shard_group_size",
    "optimizer.prefetch": "optimizer.weight_prefetch",
    "optimizer.reduce_chunk_mib": "optimizer.bucket_mib",
    "optimizer.look_ahead": "optimizer.weight_prediction",
    "optimizer.master": "optimizer.master_weights",
    "optimizer.window_mib": "optimizer.state_window_mib",
    "kernels.attention": "kernels.only.attention",
    "kernels.norm": "kernels.only.norm",
    "kernels.rotary": "kernels.only.rotary",
    "kernels.swiglu": "kernels.only.swiglu",
    "kernels.loss": "kernels.only.loss",
    "kernels.weight_grad": "kernels.only.weight_grad",
    "kernels.experts": "kernels.only.expert_gemm",
    "kernels.expert_rows": "kernels.only.moe_elementwise",
    "kernels.optimizer": "kernels.only.optimizer",
    "kernels.loss_chunk": "kernels.loss_chunk_tokens",
    "kernels.overlap": "kernels.tp_comm_overlap",
    "train.loss": "train.loss_function",
    "numbers.most_skipped": "health.max_consecutive_skips",
    "numbers.rewinds": "health.max_rewinds",
    "numbers.leave_out": "health.rewind_skip_batches",
    "numbers.rerun": "health.replay",
    "numbers.rerun_every": "health.replay_every",
    "numbers.check_copies_every": "health.replica_check_every",
    "checkpoint.background": "checkpoint.async_save",
    "checkpoint.folder": "checkpoint.url",
    "checkpoint.memory_every": "checkpoint.in_memory_every",
    "log.experts_every": "log.expert_counts_every",
    "log.samples": "log.sample_ids",
    "log.stragglers_every": "log.straggler_window",
    "log.device": "plan.device",
    "log.device_gb": "plan.device_gb",
    "log.peak_tflops": "plan.peak_tflops",
    "log.efficiency": "plan.time_factor",
}

_EFFICIENCY = 0.6
"""Value of ``log.efficiency``, a key of version 0.1, that corresponds to ``plan.time_factor=1``."""


class Renamed(NamedTuple):
    """A value of a configuration, with the current name of its key."""

    number: int
    """Index of the key and value in the input of :func:`with_new_names`."""
    key: str
    value: Any


def new_name(key: str) -> str | None:
    """Return the current name of an old key, section or mapping entry; None for a current name."""
    if key in _KEYS:
        return _KEYS[key]
    section, dot, rest = key.partition(".")
    if section in _SECTIONS:
        return f"{_SECTIONS[section]}{dot}{rest}"
    mapping = ".".join(key.split(".")[:2])
    return f"{_KEYS[mapping]}{key.removeprefix(mapping)}" if mapping in _KEYS else None


def with_new_names(values: Sequence[tuple[str, Any]]) -> list[Renamed]:
    """Replace old keys by their current names, and convert values whose meaning has changed. The
    order stays the same.

    Options that the configured update rule does not have are left out: in version 0.1 they had no
    effect.
    """
    given = dict(values)
    rule = given.get("optimizer.rule", "adamw")
    has = RULES[rule].options.model_fields if isinstance(rule, str) and rule in RULES else None
    betas = given.get("optimizer.options.betas", AdamOptions().betas)
    betas = [*betas] if isinstance(betas, list) and len(betas) == 2 else None
    found = []
    for number, (key, value) in enumerate(values):
        name = new_name(key) or key
        if key == "log.efficiency" and isinstance(value, int | float) and value:
            value = _EFFICIENCY / value
        elif key == "optimizer.beta2" and has is not None and "alpha" in has:
            name = "optimizer.options.alpha"
        elif key in ("optimizer.beta1", "optimizer.beta2"):
            if betas is None:
                continue  # validation refuses the value of optimizer.options.betas
            betas[key == "optimizer.beta2"] = value
            value = [*betas]
        before, _, option = name.rpartition(".")
        if name == key or before != "optimizer.options" or has is None or option in has:
            found.append(Renamed(number, name, value))
    return found


def stored_with_new_names(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the keys of a checkpoint, as :func:`megapipe.cli.flatten` writes them, with current
    names."""
    if not any(map(new_name, stored)):
        return stored
    values = list(stored.items())
    if stored.get("optimizer.rule") == "muon" and "optimizer.muon_split" not in stored:
        values.append(("optimizer.muon_split", "none"))  # the default of version 0.1
    found: dict[str, Any] = {}
    options: dict[str, dict[str, Any]] = {}
    for _, key, value in with_new_names(values):
        before, _, option = key.rpartition(".")
        if not before.endswith(".options"):
            found[key] = value
        elif value is not None:
            is_json = option == "ranks_per_stage" and isinstance(value, str)
            options.setdefault(before, {})[option] = json.loads(value) if is_json else value
    if stored.get("optimizer.rule") not in RULES:
        options["optimizer.options"] = {}  # a user-defined rule of version 0.1 had no options
    return found | {key: json.dumps(named) for key, named in options.items()}


def notice(where: str, keys: Iterable[str]) -> str | None:
    """Return a line with the current name of each old key among `keys`; None if none is old."""
    renamed = {key: name for key in keys if (name := new_name(key)) is not None}
    if not renamed:
        return None
    renames = ", ".join(f"{key} is {name}" for key, name in renamed.items())
    return (
        f"{where}: old key names, accepted for one more release: {renames}; megapipe config "
        "upgrade FILE rewrites a configuration"
    )
