"""For every configuration key another value than its default, made from its type."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from megapipe.cli import flatten, parse
from megapipe.config.config import Config
from megapipe.config.keys import KEYS, MAPPINGS, OPTIONS_OF
from megapipe.config.moe import MoEConfig
from megapipe.config.strict_yaml import text_of
from megapipe.errors import MegapipeError
from megapipe.layout.resolve import resolve

WORLD = 2
OPTIONS = {
    f"{mapping}.{name}": (f"{rule.key}={owner}", info)
    for mapping, rule in OPTIONS_OF.items()
    for owner, section in [*rule.sections.items()][::-1]
    for name, info in section.model_fields.items()
}
"""Every option by its dotted name: the first setting that has the option, and its field."""
GIVEN = (
    *("model.layers=2", "model.hidden=16", "model.heads=2", "train.sequence_length=16"),
    *("train.global_batch=8", "train.microbatch=2", "data.source=texts.txt", "parallel.device=cpu"),
)
"""Settings of both ranks in all cases."""
ROTARY = "model.positions=rotary"
YARN = f"{ROTARY} model.rope.scaling=yarn model.rope.factor=2 model.rope.original_positions=9"
WINDOW = "model.sliding_window=4"
EXPERTS = "model.moe.num_experts=4"
COPIES = (
    f"{EXPERTS} parallel.ep=2 experts.rebalance=balance experts.replica_slots=1 plan.peak_tflops=1"
)
OWNERS = (
    f"{EXPERTS} parallel.ep=2 experts.rebalance=migrate experts.rebalance_pool=x plan.peak_tflops=1"
)
GROUPS = f"{EXPERTS} model.moe.num_groups=2 model.moe.topk_groups=2"
SLICED = "parallel.pp=2 pipeline.schedule=seq1f1b pipeline.sequence_slices=2"
UNFLUSHED = "parallel.pp=2 optimizer.max_grad_norm=null model.tied_embeddings=false"
OWN_MODEL = "model.source=tests.parity.user_models:plain model.options.depth=2"
MARKS = "data.fim_rate=0.5 data.fim_tokens=[<a>,<b>,<c>]"
MIXED = "data.source=stdlib data.mixture.a.source=x data.mixture.b.source=y"
FOUR, SIXTEEN = "parallel.cp=4", "parallel.cp=16"
LONGER = f"{SIXTEEN} train.sequence_length=32"
BESIDE = {
    "activations.num_blocks": "activations.policy=full",
    "activations.keep_attention": "activations.policy=full",
    "activations.modules": "activations.policy=selective",
    "activations.blocks_per_recompute": "activations.policy=full",
    **dict.fromkeys(("data.fim_spm_rate", "data.fim_rate", "data.fim_tokens"), MARKS),
    **dict.fromkeys(
        (
            *("data.loss_turns", "data.prompt_field", "data.completion_field"),
            *("data.messages_field", "data.chat_template"),
        ),
        "data.sample_format=supervised",
    ),
    "data.mixture": "data.source=stdlib",
    "data.reset_position_ids": "data.document_mask=true",
    "data.split": "data.source=memory://x",
    "data.temperature": MIXED,
    **dict.fromkeys(("lora.alpha", "lora.rslora", "lora.targets"), "lora.rank=2"),
    **dict.fromkeys(
        (f"model.moe.{key}" for key in MoEConfig.model_fields if key != "num_experts"), EXPERTS
    ),
    **dict.fromkeys(("model.moe.num_groups", "model.moe.topk_groups"), GROUPS),
    "model.moe.shared_gate": f"{EXPERTS} model.moe.shared_ffn_hidden=8",
    "model.moe.drop_policy": f"{EXPERTS} model.moe.capacity_factor=1",
    **dict.fromkeys(("parallel.ep", "parallel.etp"), EXPERTS),
    **dict.fromkeys(
        ("experts.dispatch", "experts.overlap_chunks", "experts.wire_dtype"),
        f"{EXPERTS} parallel.ep=2",
    ),
    "experts.pad_to_capacity": f"{EXPERTS} model.moe.capacity_factor=1",
    "experts.link_bandwidths": f"{EXPERTS} parallel.ep=2",
    **dict.fromkeys(
        ("experts.rebalance", "experts.replica_slots", "experts.rebalance_every"), COPIES
    ),
    "experts.rebalance_pool": OWNERS,
    "experts.ranks_per_node": f"model.moe.num_experts=8 {FOUR} parallel.dp=2 parallel.ep=8 "
    "experts.dispatch=hierarchical experts.ranks_per_node=2",
    "model.zero_centered_norm": "model.norm=rmsnorm",
    "model.rope.base": ROTARY,
    "model.rope.percent": ROTARY,
    "model.rope.local_base": f"{ROTARY} {WINDOW} model.full_attention_every=2",
    "model.full_attention_every": WINDOW,
    **dict.fromkeys(
        (
            *("model.rope.scaling", "model.rope.factor", "model.rope.original_positions"),
            *("model.rope.low_freq_factor", "model.rope.high_freq_factor"),
            "model.rope.attention_factor",
        ),
        YARN,
    ),
    "model.source": OWN_MODEL,
    "model.options": OWN_MODEL,
    "optimizer.master_weights": "model.dtype=bf16",
    **dict.fromkeys(("optimizer.loss_scale", "optimizer.loss_scale_window"), "model.dtype=fp16"),
    "optimizer.weight_prefetch": "optimizer.zero=3",
    "optimizer.rounding": "optimizer.state_dtype=bf16",
    "optimizer.state_window_mib": "optimizer.offload=host",
    **dict.fromkeys(("health.spike", "health.spike_window"), "health.spike_factor=9"),
    "health.max_consecutive_skips": "health.non_finite=skip",
    **dict.fromkeys(
        ("health.max_rewinds", "health.rewind_skip_batches"), "health.non_finite=rewind"
    ),
    "log.expert_counts_every": EXPERTS,
    "log.wandb_project": "log.wandb=offline",
    **dict.fromkeys(
        ("pipeline.options.slice_overhead_tokens", "pipeline.slice_attention_cost"), SLICED
    ),
    **dict.fromkeys(
        (
            "context.algorithm",
            "context.position_split",
            "context.ulysses",
            "context.backward_circulates",
        ),
        "parallel.cp=2",
    ),
    "checkpoint.load_only": "checkpoint.load=x",
    "checkpoint.upcycle": f"{EXPERTS} checkpoint.load=x",
    "context.inner_ring_size": f"{LONGER} context.algorithm=double_ring context.inner_ring_size=8",
    "context.rank_order": f"{FOUR} context.ulysses=2",
    "context.team_size": f"{LONGER} context.algorithm=teams context.team_size=4",
    "pipeline.placement": "pipeline.schedule=auto parallel.pp=2",
    "pipeline.rank_order": "parallel.pp=2",
    "pipeline.options.microbatch_group_size": "pipeline.schedule=interleaved_1f1b parallel.pp=2 "
    "pipeline.chunks=2",
    "pipeline.options.chimera_pairs": "pipeline.schedule=chimera parallel.pp=2",
    "pipeline.options.ranks_per_stage": "pipeline.schedule=1f1b_rr parallel.pp=2",
    "pipeline.weight_versions": UNFLUSHED,
    "pipeline.prediction_horizon": f"{UNFLUSHED} pipeline.weight_versions=predict",
    "pipeline.velocity_decay": f"{UNFLUSHED} pipeline.weight_versions=correct",
    "pipeline.synchronous_steps": f"{UNFLUSHED} pipeline.weight_versions=latest",
    "pipeline.lr_anneal_steps": f"{UNFLUSHED} pipeline.weight_versions=latest",
    "optimizer.clip_scope": "parallel.pp=2 pipeline.weight_versions=double_buffer "
    "model.tied_embeddings=false",
}
"""Other settings of both ranks, without which the value would be refused or have no effect."""
FORMS = {
    "checkpoint.url": "s3://bucket/runs",
    "context.algorithm": "all_gather",
    "data.fim_tokens": "[<a>,<b>,<d>]",
    "kernels.without": "[apex]",
    "lora.targets": "[mlp.up]",
    "model.moe.score_function": "sigmoid",
    "model.norm": "rmsnorm",
    "model.options": "{depth: 3}",
    "model.source": "tests.parity.user_models:split",
    "plan.device": "H100",
    "plan.rank_speeds": "[1,0.5]",
    "pipeline.rank_order": "[1,0]",
    "train.batch_ramp": "[4,4,8]",
    "train.loss_function": "tests.parity.tiny_family:loss_of",
}
"""Values of keys whose type does not say which texts and lists they take."""
BELOW = {
    "data.mixture": "a.source=x",
    "parallel.elastic_layouts": "a.pp=2",
    "plan.links": "0-1=2",
}
"""Settings below keys that hold several values by name; others take a=x."""
ALONE = {
    "parallel.dp": "follows from the number of processes and the other axes; it differs with them",
    "plan.gpus": "is the number of processes of a plan; a run has its launcher's and no such key",
}
"""Keys without another valid value, and why."""


def candidates(annotation: Any, default: Any) -> Iterator[Any]:
    """Yield values of a type, some of them near the default."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        yield from inner
    elif annotation is bool:
        yield from (not default, bool(default))
    elif annotation is int:
        yield from (default + 1, default * 2) if isinstance(default, int) else ()
        yield from (1, 2, 4, 16, 64, 1000)
    elif annotation is float:
        yield from (default / 2, default * 2) if isinstance(default, float) else ()
        yield from (0.5, 0.25, 1.0, 2.0, 64.0)
    elif annotation is str:
        yield from ("other", "own.txt", "adam", "linear", "gpipe", "2,1", "E L | L H")
    elif origin is list:
        values = list(candidates(inner[0], None))
        yield from ([value] for value in values)
        yield from ([values[0], values[1]], values[:3]) if len(values) > 1 else ()
        yield from ([[0, 4]], [2, 2, 8])
    elif annotation is not NoneType:
        for one in inner:
            yield from candidates(one, default)


def other(key: str) -> tuple[list[str], list[str]]:
    """Return arguments of all ranks, and further arguments of one rank: the configuration is valid,
    and `key`, or an option, differs."""
    owner, info = OPTIONS[key] if key in OPTIONS else ("", KEYS[key])
    beside = BESIDE.get(key, owner)
    given = [one for one in GIVEN if beside != OWN_MODEL or not one.startswith("model.")]
    common = [*given, *beside.split()]
    before = outcome(common)[flat(key)]
    for argument in arguments(key, info):
        try:
            if outcome([*common, argument])[flat(key)] != before:
                return common, [argument]
        except MegapipeError:
            continue
    raise LookupError(key)


def flat(key: str) -> str:
    """Return the name of a key, or of an option's key, in flat configurations."""
    return key.rpartition(".")[0] if key in OPTIONS else key


def arguments(key: str, info: FieldInfo) -> Iterator[str]:
    if key in FORMS:
        yield f"{key}={FORMS[key]}"
        return
    if key in MAPPINGS:
        yield f"{key}.{BELOW.get(key, 'a=x')}"
        return
    default = info.get_default(call_default_factory=True)
    for value in candidates(info.annotation, default):
        yield f"{key}={text_of(value)}"


def outcome(given: list[str]) -> dict[str, Any]:
    """Return the flat configuration of a rank, as ranks compare it."""
    return flatten(resolved(given))


def resolved(given: list[str]) -> Config:
    return resolve(parse(given).config, None if {FOUR, SIXTEEN} & {*given} else WORLD, 257)[0]
