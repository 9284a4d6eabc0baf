"""For every key of the configuration another value than its default, made from its type."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from megapipe.cli import flatten, parse
from megapipe.config.config import Config
from megapipe.config.keys import KEYS, MAPPINGS
from megapipe.config.moe import MoEConfig
from megapipe.config.strict_yaml import text_of
from megapipe.errors import MegapipeError
from megapipe.layout.resolve import resolve

WORLD = 2
GIVEN = (
    *("model.layers=2", "model.hidden=16", "model.heads=2", "train.sequence_length=16"),
    *("train.global_batch=8", "train.microbatch=2", "data.source=texts.txt", "parallel.device=cpu"),
)
"""What both ranks are given in all cases."""
ROTARY = "model.positions=rotary"
YARN = f"{ROTARY} model.rotary_scaling=yarn model.rotary_factor=2 model.rotary_original_positions=9"
WINDOW = "model.window=4"
EXPERTS = "model.moe.experts=4"
COPIES = f"{EXPERTS} parallel.ep=2 experts.policy=balance experts.slots=1 log.peak_tflops=1"
OWNERS = f"{EXPERTS} parallel.ep=2 experts.policy=migrate experts.pool=x log.peak_tflops=1"
GROUPS = f"{EXPERTS} model.moe.groups=2 model.moe.group_top_k=2"
SLICED = "parallel.pp=2 pipeline.schedule=seq1f1b pipeline.slices=2"
OWN_MODEL = "model.source=tests.parity.own_models:plain model.options.depth=2"
MARKS = "data.fim_rate=0.5 data.fim_tokens=[<a>,<b>,<c>]"
MIXED = "data.source=stdlib data.mixture.a.source=x data.mixture.b.source=y"
FOUR, SIXTEEN = "parallel.cp=4", "parallel.cp=16"
LONGER = f"{SIXTEEN} train.sequence_length=32"
BESIDE = {
    "activations.blocks": "activations.policy=full",
    "activations.keep_attention": "activations.policy=full",
    "activations.modules": "activations.policy=selective",
    "activations.span": "activations.policy=full",
    **dict.fromkeys(("data.fim_spm_rate", "data.fim_rate", "data.fim_tokens"), MARKS),
    **dict.fromkeys(
        (
            *("data.train_on", "data.prompt_field", "data.completion_field"),
            *("data.messages_field", "data.chat_template"),
        ),
        "data.samples=supervised",
    ),
    "data.mixture": "data.source=stdlib",
    "data.reset_positions": "data.document_mask=true",
    "data.split": "data.source=memory://x",
    "data.temperature": MIXED,
    **dict.fromkeys(("lora.alpha", "lora.rslora", "lora.targets"), "lora.rank=2"),
    **dict.fromkeys(
        (f"model.moe.{key}" for key in MoEConfig.model_fields if key != "experts"), EXPERTS
    ),
    **dict.fromkeys(("model.moe.groups", "model.moe.group_top_k"), GROUPS),
    "model.moe.shared_gate": f"{EXPERTS} model.moe.shared=8",
    "model.moe.drop": f"{EXPERTS} model.moe.capacity=1",
    **dict.fromkeys(("parallel.ep", "parallel.etp"), EXPERTS),
    **dict.fromkeys(
        ("experts.dispatch", "experts.chunks", "experts.codec"), f"{EXPERTS} parallel.ep=2"
    ),
    "experts.pad": f"{EXPERTS} model.moe.capacity=1",
    "experts.topology": f"{EXPERTS} parallel.ep=2",
    **dict.fromkeys(("experts.policy", "experts.slots", "experts.replan"), COPIES),
    "experts.pool": OWNERS,
    "experts.node": f"model.moe.experts=8 {FOUR} parallel.dp=2 parallel.ep=8 "
    "experts.dispatch=hierarchical experts.node=2",
    "model.norm_offset": "model.norm=rmsnorm",
    "model.rotary_base": ROTARY,
    "model.rotary_share": ROTARY,
    "model.rotary_local_base": f"{ROTARY} {WINDOW} model.full_attention_every=2",
    "model.full_attention_every": WINDOW,
    **dict.fromkeys(
        (
            *("model.rotary_scaling", "model.rotary_factor", "model.rotary_original_positions"),
            *("model.rotary_turns_low", "model.rotary_turns_high"),
            "model.rotary_attention_factor",
        ),
        YARN,
    ),
    "model.source": OWN_MODEL,
    "model.options": OWN_MODEL,
    "optimizer.master": "model.dtype=bf16",
    **dict.fromkeys(("optimizer.loss_scale", "optimizer.loss_scale_window"), "model.dtype=fp16"),
    "optimizer.prefetch": "optimizer.zero=3",
    "optimizer.rounding": "optimizer.state_dtype=bf16",
    "optimizer.window_mib": "optimizer.offload=host",
    **dict.fromkeys(("numbers.spike", "numbers.spike_window"), "numbers.spike_factor=9"),
    "numbers.most_skipped": "numbers.non_finite=skip",
    **dict.fromkeys(("numbers.rewinds", "numbers.leave_out"), "numbers.non_finite=rewind"),
    "log.experts_every": EXPERTS,
    "log.wandb_project": "log.wandb=offline",
    **dict.fromkeys(("pipeline.slice_overhead", "pipeline.slice_attention"), SLICED),
    **dict.fromkeys(
        ("context.plan", "context.order", "context.ulysses", "context.travels"), "parallel.cp=2"
    ),
    "checkpoint.load_only": "checkpoint.load=x",
    "checkpoint.upcycle": f"{EXPERTS} checkpoint.load=x",
    "context.inner": f"{LONGER} context.plan=double_ring context.inner=8",
    "context.ranks": f"{FOUR} context.ulysses=2",
    "context.team": f"{LONGER} context.plan=teams context.team=4",
    "pipeline.placement": "pipeline.schedule=auto parallel.pp=2",
    "pipeline.group": "pipeline.schedule=interleaved_1f1b parallel.pp=2 pipeline.chunks=2",
    "pipeline.pairs": "pipeline.schedule=chimera parallel.pp=2",
    "pipeline.replicas": "pipeline.schedule=1f1b_rr parallel.pp=2",
    "pipeline.weights": "parallel.pp=2 optimizer.clip=null model.tied_embeddings=false",
    "pipeline.horizon": "parallel.pp=2 pipeline.weights=predict optimizer.clip=null "
    "model.tied_embeddings=false",
    "pipeline.correction": "parallel.pp=2 pipeline.weights=correct optimizer.clip=null "
    "model.tied_embeddings=false",
    "pipeline.synchronous_steps": "parallel.pp=2 pipeline.weights=latest optimizer.clip=null "
    "model.tied_embeddings=false",
    "pipeline.lr_anneal_steps": "parallel.pp=2 pipeline.weights=latest optimizer.clip=null "
    "model.tied_embeddings=false",
    "optimizer.clip_scope": "parallel.pp=2 pipeline.weights=double_buffer "
    "model.tied_embeddings=false",
}
"""Other settings of both ranks, without which another value would be refused or have no effect."""
FORMS = {
    "checkpoint.folder": "s3://bucket/runs",
    "context.plan": "all_gather",
    "data.fim_tokens": "[<a>,<b>,<d>]",
    "log.device": "H100",
    "lora.targets": "[mlp.up]",
    "model.moe.scores": "sigmoid",
    "model.norm": "rmsnorm",
    "model.options": "{depth: 3}",
    "model.source": "tests.parity.own_models:split",
    "train.batch_ramp": "[4,4,8]",
    "train.loss": "tests.parity.tiny_family:loss_of",
}
"""Values of keys whose type does not tell which texts and lists they take."""
BELOW = {"data.mixture": "a.source=x", "parallel.layouts": "a.pp=2"}
"""Settings below keys that hold several sections by name."""
ALONE = {
    "parallel.dp": "follows from the number of processes and the other axes; it differs with them",
}
"""Keys that have no other valid value, and why."""


def candidates(annotation: Any, default: Any) -> Iterator[Any]:
    """Values of a type, some of them near the default."""
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
    """What all ranks are given, and what another one is given besides, so that a valid
    configuration comes out in which `key` is another."""
    beside = BESIDE.get(key, "")
    given = [one for one in GIVEN if beside != OWN_MODEL or not one.startswith("model.")]
    common = [*given, *beside.split()]
    before = outcome(common)[key]
    for argument in arguments(key, KEYS[key]):
        try:
            if outcome([*common, argument])[key] != before:
                return common, [argument]
        except MegapipeError:
            continue
    raise LookupError(key)


def arguments(key: str, info: FieldInfo) -> Iterator[str]:
    if key in FORMS:
        yield f"{key}={FORMS[key]}"
        return
    if key in MAPPINGS:
        yield f"{key}.a=x" if MAPPINGS[key] is None else f"{key}.{BELOW[key]}"
        return
    default = info.get_default(call_default_factory=True)
    for value in candidates(info.annotation, default):
        yield f"{key}={text_of(value)}"


def outcome(given: list[str]) -> dict[str, Any]:
    """The flat configuration of a rank, as ranks compare it."""
    return flatten(resolved(given))


def resolved(given: list[str]) -> Config:
    return resolve(parse(given).config, None if {FOUR, SIXTEEN} & {*given} else WORLD, 257)[0]
