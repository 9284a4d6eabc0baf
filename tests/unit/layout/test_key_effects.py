"""Keys that have a value and, beside the others, no effect: refused in one line, or taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megapipe.cli import dump, parse
from megapipe.config.moe import MoEConfig
from megapipe.config.presets import find, names
from megapipe.errors import ConfigError
from megapipe.layout.resolve import resolve
from tests.parity.other_values import ALONE, BESIDE

BETWEEN = r", (?=[a-z]+\.)"
"""Stands between keys of a line, and not between the values of a list."""
REFUSED = [
    ("optimizer.min_lr=0.0", "optimizer.schedule=constant",
     "without optimizer.schedule=cosine, linear or wsd", "3.0e-05, or that setting"),
    ("optimizer.min_lr=0.0, optimizer.decay_steps=9", "optimizer.schedule=constant",
     "without optimizer.schedule=cosine, linear or wsd", "3.0e-05 and null, or that setting"),
    ("optimizer.weight_prefetch=0", "optimizer.zero=2", "without optimizer.zero=3",
     "1, or that setting"),
    ("optimizer.shard_group_size=1", "optimizer.zero=0", "without optimizer.zero above 0",
     "null, or that setting"),
    ("optimizer.rounding=nearest", "model.dtype=bf16",
     "without optimizer.state_dtype=bf16 or optimizer.master_weights=none",
     "stochastic, or that setting"),
    ("optimizer.state_window_mib=8.0", "model.dtype=bf16",
     "without optimizer.state_dtype=bf16, optimizer.master_weights=none or optimizer.offload",
     "64.0, or that setting"),
    ("optimizer.loss_scale=8.0, optimizer.loss_scale_window=9", "", "without model.dtype=fp16",
     "null and 2000, or that setting"),
    ("optimizer.loss_scale_window=9", "optimizer.loss_scale=8 model.dtype=fp16",
     "without optimizer.loss_scale=null", "2000, or that setting"),
    ("pipeline.lr_anneal_steps=3, pipeline.synchronous_steps=2, optimizer.clip_scope=stage", "",
     "without a pipeline.weight_versions other than synchronous",
     "null, null and global, or that setting"),
    ("pipeline.prediction_horizon=round_trip", "", "without pipeline.weight_versions=predict",
     "update, or that setting"),
    ("pipeline.velocity_decay=0.5", "", "without pipeline.weight_versions=correct",
     "null, or that setting"),
    ("pipeline.placement=v", "", "without pipeline.schedule=auto", "null, or that setting"),
    ("pipeline.slice_attention_cost=2.0", "", "where sequences are not cut",
     "1.0, or a pipeline.schedule with slices"),
    ("pipeline.options.slice_overhead_tokens=8",
     "pipeline.schedule=seq1f1b pipeline.sequence_slices=1", "where sequences are not cut",
     "null, or a pipeline.schedule with slices"),
    ("pipeline.slice_attention_cost=2.0", "pipeline.schedule=seq1f1b pipeline.sequence_slices=1",
     "where sequences are not cut", "1.0, or a pipeline.schedule with slices"),
    ("activations.num_blocks=1", "",
     "without activations.policy=selective or full, or activations.offload",
     "null, or that setting"),
    ("activations.num_blocks=1, activations.offload=[norm]", "activations.policy=stage",
     "without an activations.policy other than stage", "null and [], or that setting"),
    ("activations.modules=[norm]", "", "without activations.policy=selective",
     "[norm, attention, mlp_activation], or that setting"),
    ("activations.blocks_per_recompute=2", "activations.policy=selective",
     "without activations.policy=full",
     "1, or that setting"),
    ("activations.keep_attention=true", "", "where attention is not recomputed",
     "false, or activations.policy=full, stage or selective with attention"),
    ("health.spike_window=9, health.spike=stop", "", "without health.spike_factor",
     "100 and rewind, or that setting"),
    ("health.max_consecutive_skips=2", "",
     "without health.non_finite=skip, or health.spike=skip with health.spike_factor",
     "10, or that setting"),
    ("health.max_rewinds=2, health.rewind_skip_batches=3",
     "health.spike_factor=9 health.spike=skip",
     "without health.non_finite=rewind, or health.spike=rewind with health.spike_factor",
     "3 and 1, or that setting"),
    ("checkpoint.load_only=weights", "", "without checkpoint.load", "all, or that setting"),
    ("checkpoint.load_only=weights, checkpoint.upcycle=true", "model.moe.num_experts=4",
     "without checkpoint.load", "all and false, or that setting"),
    ("log.wandb_project=x", "", "without log.wandb=online or offline", "megapipe, or that setting"),
    (("model.moe.top_k=1, parallel.ep=2, experts.overlap_chunks=2, experts.pad_to_capacity=true, "
      "checkpoint.upcycle=true, log.expert_counts_every=9"), "", "without model.moe.num_experts",
     "2, 1, 1, false, false and 100, or that setting"),
    ("experts.overlap_chunks=2, experts.wire_dtype=int8", "model.moe.num_experts=4",
     "without parallel.ep or parallel.etp above 1", "1 and none, or that setting"),
    ("experts.rebalance=balance, experts.replica_slots=1, experts.rebalance_every=5",
     "model.moe.num_experts=4",
     "without parallel.ep above 1", "none, 0 and 10, or that setting"),
    ("experts.pad_to_capacity=true", "model.moe.num_experts=4", "without model.moe.capacity_factor",
     "false, or that setting"),
    ("experts.rebalance_pool=x", "model.moe.num_experts=4 parallel.dp=2 parallel.ep=2",
     "without experts.rebalance=migrate", "null, or that setting"),
    ("experts.ranks_per_node=2", "model.moe.num_experts=4 parallel.dp=2 parallel.ep=2",
     "without experts.dispatch=hierarchical", "null, or that setting"),
    ("experts.link_bandwidths=[2.0, 1.0]",
     "model.moe.num_experts=4 parallel.dp=2 parallel.ep=2 model.moe.aux_loss_coeff=0",
     "without model.moe.aux_loss_coeff", "null, or that setting"),
    ("model.moe.num_groups=2", "model.moe.num_experts=4", "without model.moe.topk_groups",
     "1, or that setting"),
    ("model.moe.shared_gate=sigmoid", "model.moe.num_experts=4",
     "without model.moe.shared_ffn_hidden",
     "none, or that setting"),
    ("model.moe.drop_policy=score", "model.moe.num_experts=4", "without model.moe.capacity_factor",
     "choice, or that setting"),
    ("model.moe.aux_loss_scope=step, model.moe.aux_loss_choices=first",
     "model.moe.num_experts=4 model.moe.aux_loss_coeff=0", "without model.moe.aux_loss_coeff",
     "sequence and all, or that setting"),
    ("model.options.width=64, model.options.depth=2", "", "without model.source",
     "none, or that setting"),
    ("model.layers=2, model.moe.num_experts=4",
     "model.source=tests.parity.user_models:plain model.options.depth=2",
     "with model.source=tests.parity.user_models:plain, which is not the built-in model",
     ("them removed; to remove them from a file's values: model=unset before "
      "model.source (or model.options.layers, if it takes that)")),
    ("model.moe.num_experts=4", "model.source=tests.parity.user_models:plain model.options.depth=2",
     "with model.source=tests.parity.user_models:plain, which is not the built-in model",
     ("it removed; to remove it from a file's values: model.moe.num_experts=unset before "
      "model.source")),
    ("kernels.only.attention=flash, kernels.only.norm=torch",
     "model.source=tests.parity.user_models:plain model.options.depth=2",
     "with model.source, which calls none of megapipe's", "auto and auto"),
    ("model.zero_centered_norm=true", "", "without model.norm=rmsnorm", "false, or that setting"),
    ("model.rope.base=9.0, model.rope.percent=0.5, model.rope.scaling=linear", "",
     "without model.positions=rotary", "10000.0, 1.0 and none, or that setting"),
    ("model.full_attention_every=2, model.rope.local_base=9.0", "model.positions=rotary",
     "without model.sliding_window", "null and null, or that setting"),
    ("model.rope.factor=2.0", "model.positions=rotary", "without model.rope.scaling",
     "1.0, or that setting"),
    (("model.rope.original_positions=9, model.rope.low_freq_factor=2.0, "
      "model.rope.high_freq_factor=3.0"),
     "model.positions=rotary", "without model.rope.scaling=llama3 or yarn",
     "null, 1.0 and 4.0, or that setting"),
    ("model.rope.attention_factor=2.0", "model.positions=rotary",
     "without model.rope.scaling=yarn", "null, or that setting"),
    ("lora.alpha=2.0, lora.rslora=true, lora.targets=[mlp.up]", "", "without lora.rank",
     "8.0, false and [all], or that setting"),
    ("context.algorithm=all_gather, context.position_split=striped", "",
     "without a ring of ranks (parallel.cp / context.ulysses is 1)",
     "ring and zigzag, or that setting"),
    ("context.inner_ring_size=2", "parallel.cp=2", "without context.algorithm=double_ring",
     "null, or that setting"),
    ("context.team_size=2", "parallel.cp=2", "without context.algorithm=teams",
     "null, or that setting"),
    ("context.backward_circulates=keys", "parallel.cp=2 context.algorithm=all_gather",
     "without a ring of ranks and context.algorithm=ring or double_ring", "auto, or that setting"),
    ("context.rank_order=context_first", "parallel.cp=2",
     "without both a ring of ranks and context.ulysses above 1", "heads_first, or that setting"),
    ("kernels.only.swiglu=liger", "", "without model.activation=swiglu", "auto, or that setting"),
    ("kernels.only.rotary=inductor", "", "without model.positions=rotary", "auto, or that setting"),
    ("kernels.only.loss=inductor", "kernels.loss_chunk_tokens=0",
     "without a loss in chunks (kernels.loss_chunk_tokens)", "auto, or that setting"),
    ("kernels.only.expert_gemm=grouped, kernels.only.moe_elementwise=inductor", "",
     "without model.moe.num_experts",
     "auto and auto, or that setting"),
    ("kernels.only.optimizer=apex", "optimizer.rule=sgd",
     "without optimizer.rule=adamw, adam or muon",
     "auto, or that setting"),
    ("data.subset=en, data.text_field=body", "data.source=a.txt",
     "with data.source=a.txt, which is a text file", "null and text"),
    ("data.text_field=body", "data.source=a.txt.gz",
     "with data.source=a.txt.gz, which is a text file", "text"),
    ("data.subset=en", "data.source=a.jsonl", "with data.source=a.jsonl, which is texts", "null"),
    ("data.subset=en", "data.source=folder", "with data.source=folder, which is texts", "null"),
    ("data.subset=en", "data.source=saved data.dataset_split=dev",
     "with data.source=saved, which is a saved data set", "null"),
    ("data.subset=en, data.dataset_split=dev", "",
     "with data.source=stdlib, which is Python's standard library", "null and null"),
    ("data.subset=en, data.dataset_split=dev", "data.mixture.a.source=a.jsonl", "with data.mixture",
     "null and null, and data.mixture.NAME.subset and data.mixture.NAME.dataset_split"),
    ("data.mixture.a.subset=en", "data.mixture.a.source=a.jsonl",
     "with data.mixture.a.source=a.jsonl, which is texts", "null"),
    ("data.text_field=body", "data.source=a.txt data.test.x=a.txt",
     "with data.source=a.txt, which is a text file", "text"),
    ("data.text_field=y, data.mixture.a.text_field=x",
     "data.mixture.a.source=a.jsonl data.sample_format=supervised",
     "with data.sample_format=supervised",
     "text and null"),
    ("data.mixture.a.tokens=9, data.mixture.a.epochs=2.0",
     "data.mixture.a.source=a.jsonl data.sample_format=megatron",
     "with data.sample_format=megatron, whose blends have only weights", "null and null"),
    ("data.temperature=2.0", "data.mixture.a.source=a.jsonl data.sample_format=megatron",
     "with data.sample_format=megatron, which takes sources without weights by their sizes",
     "1.0, or data.mixture.NAME.weight"),
    ("data.temperature=2.0", "", "without data.mixture", "1.0, or that setting"),
    ("data.validation_fraction=0.1", "data.validation.x=a.txt", "with data.validation",
     "0.02, or no data.validation"),
    ("data.validation_fraction=0.1", "data.split=9,1 data.source=s3://x/y", "with data.split",
     "0.02, or data.split=null"),
    ("data.split=9,1", "", "with data.source=stdlib, which is Python's standard library",
     "null, and data.validation_fraction, data.validation.NAME or data.test.NAME"),
    ("data.reset_position_ids=true", "", "without data.document_mask=true",
     "false, or that setting"),
    ("data.fim_spm_rate=0.1, data.fim_tokens=[a, b, c]", "", "without data.fim_rate above 0",
     "0.5 and null, or that setting"),
    (("data.prompt_field=a, data.completion_field=b, data.messages_field=c, "
      "data.chat_template=d, data.loss_turns=last"), "", "without data.sample_format=supervised",
     "prompt, completion, messages, null and all, or that setting"),
]  # fmt: skip
"""Keys as a line has them, other keys that are given, and the rest of the line: why they have no
effect, and what is expected."""
OTHERWISE = {
    *("context.ulysses", "data.fim_rate", "data.mixture", "model.source"),
    *(
        "optimizer.master_weights",
        "pipeline.options.microbatch_group_size",
        "pipeline.options.chimera_pairs",
        "pipeline.options.ranks_per_stage",
    ),
    *("pipeline.rank_order", "pipeline.weight_versions"),
}
"""Keys that need others, and without them are refused for another reason than that they have no
effect."""
OF_EXPERTS = {
    *(f"model.moe.{key}" for key in MoEConfig.model_fields if key != "num_experts"),
    *("experts.dispatch", "parallel.etp"),
}
"""Keys that need experts; the table has some of these keys."""
TAKEN = [
    "optimizer.offload_folder=x data.cache=x data.tokenizer_workers=1",
    (
        "optimizer.clip_scope=stage optimizer.max_grad_norm=null "
        "pipeline.weight_versions=double_buffer parallel.pp=2"
    ),
    "parallel.sequence_parallel=true kernels.tp_comm_overlap=false log.straggler_window=5",
    "optimizer.zero=3 optimizer.reduce_dtype=bf16 optimizer.bucket_mib=1",
    (
        "parallel.ranks_per_node=4 plan.intra_node_gb_s=9 plan.inter_node_gb_s=9 "
        "plan.link_latency_us=9"
    ),
    "run.deterministic=true log.memory_history=true",
    "pipeline.p2p_max_ctas=2 pipeline.recv_prefetch=1",
    "train.validate_every=3 train.validation_samples=9 data.validation_fraction=0",
    "experts.dispatch=auto experts.overlap_chunks=auto",
    (
        "kernels.only.rotary=torch kernels.only.swiglu=torch kernels.only.expert_gemm=loop "
        "kernels.only.moe_elementwise=torch"
    ),
    "data.document_mask=true data.reset_position_ids=true model.positions=rotary",
    "data.document_mask=true data.sample_format=packed",
    "data.validation_fraction=0 data.validation.x=a.txt",
    "pipeline.scatter_gather=off",
    "model.full_attention_every=6",
]
"""Keys that are taken where they have no effect (docs/decisions/layout.md)."""
WITH_EFFECT = [
    "model.max_positions=4096 model.positions=rotary",
    "data.text_field=body data.source=a.txt data.test.x=a.jsonl",
    "data.text_field=body data.source=folder",
    "data.text_field=body data.subset=en data.source=some/name",
    "data.subset=en data.dataset_split=dev data.source=folder",
    "data.text_field=body data.source=s3://x/y.txt",
    "optimizer.lr=1e-6 optimizer.schedule=constant",
    "activations.num_blocks=1 activations.offload=[norm]",
    "health.max_rewinds=2 health.spike_factor=9",
    (
        "pipeline.options.slice_overhead_tokens=1 pipeline.slice_attention_cost=2 "
        "pipeline.schedule=terapipe"
    ),
]
"""Keys that are near refused ones, and have an effect."""


@pytest.fixture(autouse=True)
def _sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.txt.gz", "a.jsonl"):
        (tmp_path / name).touch()
    for name in ("folder", "saved"):
        (tmp_path / name).mkdir()
    (tmp_path / "saved/dataset_info.json").touch()


@pytest.mark.parametrize(("keys", "beside", "why", "right"), REFUSED)
def test_keys_without_effect_are_refused_in_one_line(
    keys: str, beside: str, why: str, right: str
) -> None:
    given = re.split(BETWEEN, keys)
    with pytest.raises(ConfigError) as caught:
        resolve(parse([*given, *beside.split()]).config, None, None)
    has = "has" if len(given) == 1 else "have"
    assert str(caught.value) == f"configuration: {keys} {has} no effect {why}: expected {right}"


@pytest.mark.parametrize(
    ("rule", "options", "has"),
    [
        ("adamw", "momentum=0.5 nesterov=false trust_coefficient=0.1", "betas, eps"),
        ("adamw", "momentum_decay=0.1 adjust_lr_fn=original split_qkv=heads", "betas, eps"),
        ("sgd", "adamw_lr_scale=0.5 betas=[0.5,0.5]", "momentum, nesterov"),
    ],
)
def test_options_of_other_rules_are_refused(rule: str, options: str, has: str) -> None:
    for option in options.split():
        shown = option.replace(",", ", ")
        with pytest.raises(ConfigError) as caught:
            parse([f"optimizer.options.{option}", f"optimizer.rule={rule}"])
        assert str(caught.value) == (
            f"command line: optimizer.options.{shown}: optimizer.rule={rule} has no such option: "
            f"it has {has}"
        )


@pytest.mark.parametrize("given", TAKEN + WITH_EFFECT)
def test_other_keys_are_taken(given: str) -> None:
    resolve(parse(given.split()).config, None, None)


def test_every_key_that_needs_another_is_in_the_table() -> None:
    """BESIDE has the settings with which a key of the configuration has another value."""
    refused = {one.split("=")[0] for keys, *_ in REFUSED for one in re.split(BETWEEN, keys)}
    refused |= {"model.options"}  # whose entries the table has
    assert BESIDE.keys() <= refused | OTHERWISE | OF_EXPERTS
    assert refused.isdisjoint({*ALONE, *OTHERWISE})


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("parallel.tp=2", "parallel.tp=2: model.source has no support for it; expected 1"),
        (
            "parallel.tp=2 kernels.compile=true activations.policy=[full,keep] parallel.cp=2",
            (
                "parallel.tp=2, parallel.cp=2, activations.policy=full, kernels.compile=true: "
                "model.source has no support for them; expected parallel.tp=1, parallel.cp=1, "
                "activations.policy=keep or stage, kernels.compile=false"
            ),
        ),
    ],
)
def test_what_a_model_lacks_is_refused_in_one_line(given: str, line: str) -> None:
    own = ["model.source=tests.parity.user_models:plain", "model.options.depth=2"]
    with pytest.raises(ConfigError) as caught:
        resolve(parse([*own, *given.split()]).config, None, None)
    assert str(caught.value) == f"configuration: {line}"


@pytest.mark.parametrize("name", names())
def test_what_a_run_stores_is_taken_again(name: str, tmp_path: Path) -> None:
    """It has every key, and defaults that are filled in."""
    config, _ = resolve(parse([str(find(name))]).config, None, None)
    (tmp_path / "stored.yaml").write_text(dump(config))
    stored = parse([str(tmp_path / "stored.yaml")]).config
    assert resolve(stored, None, None)[0] == config
