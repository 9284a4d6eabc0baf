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
     "without optimizer.schedule=cosine, linear or wsd", "3.0e-05, or that"),
    ("optimizer.min_lr=0.0, optimizer.decay_steps=9", "optimizer.schedule=constant",
     "without optimizer.schedule=cosine, linear or wsd", "3.0e-05 and null, or that"),
    ("optimizer.prefetch=0", "optimizer.zero=2", "without optimizer.zero=3", "1, or that"),
    ("optimizer.shard_size=1", "optimizer.zero=0", "without optimizer.zero above 0",
     "null, or that"),
    ("optimizer.rounding=nearest", "model.dtype=bf16",
     "without optimizer.state_dtype=bf16 or optimizer.master=none", "stochastic, or that"),
    ("optimizer.window_mib=8.0", "model.dtype=bf16",
     "without optimizer.state_dtype=bf16, optimizer.master=none or optimizer.offload",
     "64.0, or that"),
    ("optimizer.loss_scale=8.0, optimizer.loss_scale_window=9", "", "without model.dtype=fp16",
     "null and 2000, or that"),
    ("optimizer.loss_scale_window=9", "optimizer.loss_scale=8 model.dtype=fp16",
     "without optimizer.loss_scale=null", "2000, or that"),
    ("pipeline.lr_anneal_steps=3, pipeline.synchronous_steps=2, optimizer.clip_scope=stage", "",
     "without a pipeline.weights other than synchronous", "null, null and global, or that"),
    ("pipeline.horizon=round_trip", "", "without pipeline.weights=predict", "update, or that"),
    ("pipeline.correction=0.5", "", "without pipeline.weights=correct", "null, or that"),
    ("pipeline.placement=v", "", "without pipeline.schedule=auto", "null, or that"),
    ("pipeline.slice_overhead=8.0, pipeline.slice_attention=2.0", "", "where sequences are not cut",
     "null and 1.0, or a pipeline.schedule with slices"),
    ("pipeline.slice_attention=2.0", "pipeline.schedule=seq1f1b pipeline.slices=1",
     "where sequences are not cut", "1.0, or a pipeline.schedule with slices"),
    ("activations.blocks=1", "",
     "without activations.policy=selective or full, or activations.offload", "null, or that"),
    ("activations.blocks=1, activations.offload=[norm]", "activations.policy=stage",
     "without an activations.policy other than stage", "null and [], or that"),
    ("activations.modules=[norm]", "", "without activations.policy=selective",
     "[norm, attention, mlp_activation], or that"),
    ("activations.span=2", "activations.policy=selective", "without activations.policy=full",
     "1, or that"),
    ("activations.keep_attention=true", "", "where attention is not run again",
     "false, or activations.policy=full, stage or selective with attention"),
    ("numbers.spike_window=9, numbers.spike=stop", "", "without numbers.spike_factor",
     "100 and rewind, or that"),
    ("numbers.most_skipped=2", "",
     "without numbers.non_finite=skip, or numbers.spike=skip with numbers.spike_factor",
     "10, or that"),
    ("numbers.rewinds=2, numbers.leave_out=3", "numbers.spike_factor=9 numbers.spike=skip",
     "without numbers.non_finite=rewind, or numbers.spike=rewind with numbers.spike_factor",
     "3 and 1, or that"),
    ("checkpoint.load_only=weights", "", "without checkpoint.load", "all, or that"),
    ("checkpoint.load_only=weights, checkpoint.upcycle=true", "model.moe.experts=4",
     "without checkpoint.load", "all and false, or that"),
    ("log.wandb_project=x", "", "without log.wandb=online or offline", "megapipe, or that"),
    (("model.moe.top_k=1, parallel.ep=2, experts.chunks=2, experts.pad=true, "
      "checkpoint.upcycle=true, log.experts_every=9"), "", "without model.moe.experts",
     "2, 1, 1, false, false and 100, or that"),
    ("experts.chunks=2, experts.codec=int8", "model.moe.experts=4",
     "without parallel.ep or parallel.etp above 1", "1 and none, or that"),
    ("experts.policy=balance, experts.slots=1, experts.replan=5", "model.moe.experts=4",
     "without parallel.ep above 1", "none, 0 and 10, or that"),
    ("experts.pad=true", "model.moe.experts=4", "without model.moe.capacity", "false, or that"),
    ("experts.pool=x", "model.moe.experts=4 parallel.dp=2 parallel.ep=2",
     "without experts.policy=migrate", "null, or that"),
    ("experts.node=2", "model.moe.experts=4 parallel.dp=2 parallel.ep=2",
     "without experts.dispatch=hierarchical", "null, or that"),
    ("experts.topology=[2.0, 1.0]",
     "model.moe.experts=4 parallel.dp=2 parallel.ep=2 model.moe.balance=0",
     "without model.moe.balance", "null, or that"),
    ("model.moe.groups=2", "model.moe.experts=4", "without model.moe.group_top_k", "1, or that"),
    ("model.moe.shared_gate=sigmoid", "model.moe.experts=4", "without model.moe.shared",
     "none, or that"),
    ("model.moe.drop=score", "model.moe.experts=4", "without model.moe.capacity",
     "choice, or that"),
    ("model.moe.balance_scope=step, model.moe.balance_choices=first",
     "model.moe.experts=4 model.moe.balance=0", "without model.moe.balance",
     "sequence and all, or that"),
    ("model.options.width=64, model.options.depth=2", "", "without model.source", "none, or that"),
    ("model.layers=2, model.moe.experts=4",
     "model.source=tests.parity.own_models:plain model.options.depth=2",
     "with model.source=tests.parity.own_models:plain, which is no built-in model",
     ("them left out, where a file has them by model=unset before model.source (or "
      "model.options.layers, if it takes that)")),
    ("model.moe.experts=4", "model.source=tests.parity.own_models:plain model.options.depth=2",
     "with model.source=tests.parity.own_models:plain, which is no built-in model",
     "it left out, where a file has it by model.moe.experts=unset before model.source"),
    ("kernels.attention=flash, kernels.norm=torch",
     "model.source=tests.parity.own_models:plain model.options.depth=2",
     "with model.source, which calls none of megapipe's", "auto and auto"),
    ("model.norm_offset=true", "", "without model.norm=rmsnorm", "false, or that"),
    ("model.rotary_base=9.0, model.rotary_share=0.5, model.rotary_scaling=linear", "",
     "without model.positions=rotary", "10000.0, 1.0 and none, or that"),
    ("model.rotary_local_base=9.0, model.full_attention_every=2", "model.positions=rotary",
     "without model.window", "null and null, or that"),
    ("model.rotary_factor=2.0", "model.positions=rotary", "without model.rotary_scaling",
     "1.0, or that"),
    ("model.rotary_original_positions=9, model.rotary_turns_low=2.0, model.rotary_turns_high=3.0",
     "model.positions=rotary", "without model.rotary_scaling=llama3 or yarn",
     "null, 1.0 and 4.0, or that"),
    ("model.rotary_attention_factor=2.0", "model.positions=rotary",
     "without model.rotary_scaling=yarn", "null, or that"),
    ("lora.alpha=2.0, lora.rslora=true, lora.targets=[mlp.up]", "", "without lora.rank",
     "8.0, false and [all], or that"),
    ("context.plan=all_gather, context.order=striped", "",
     "without a ring of ranks (parallel.cp / context.ulysses is 1)", "ring and zigzag, or that"),
    ("context.inner=2", "parallel.cp=2", "without context.plan=double_ring", "null, or that"),
    ("context.team=2", "parallel.cp=2", "without context.plan=teams", "null, or that"),
    ("context.travels=keys", "parallel.cp=2 context.plan=all_gather",
     "without a ring of ranks and context.plan=ring or double_ring", "auto, or that"),
    ("context.ranks=context_first", "parallel.cp=2",
     "without both a ring of ranks and context.ulysses above 1", "heads_first, or that"),
    ("kernels.swiglu=liger", "", "without model.activation=swiglu", "auto, or that"),
    ("kernels.rotary=inductor", "", "without model.positions=rotary", "auto, or that"),
    ("kernels.loss=inductor", "kernels.loss_chunk=0",
     "without a loss in chunks (kernels.loss_chunk)", "auto, or that"),
    ("kernels.experts=grouped, kernels.expert_rows=inductor", "", "without model.moe.experts",
     "auto and auto, or that"),
    ("kernels.optimizer=apex", "optimizer.rule=sgd", "without optimizer.rule=adamw, adam or muon",
     "auto, or that"),
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
     "data.mixture.a.source=a.jsonl data.samples=supervised", "with data.samples=supervised",
     "text and null"),
    ("data.mixture.a.tokens=9, data.mixture.a.epochs=2.0",
     "data.mixture.a.source=a.jsonl data.samples=megatron",
     "with data.samples=megatron, whose blends have weights alone", "null and null"),
    ("data.temperature=2.0", "data.mixture.a.source=a.jsonl data.samples=megatron",
     "with data.samples=megatron, which takes sources without weights by their sizes",
     "1.0, or data.mixture.NAME.weight"),
    ("data.temperature=2.0", "", "without data.mixture", "1.0, or that"),
    ("data.validation_fraction=0.1", "data.validation.x=a.txt", "with data.validation",
     "0.02, or no data.validation"),
    ("data.validation_fraction=0.1", "data.split=9,1 data.source=s3://x/y", "with data.split",
     "0.02, or data.split=null"),
    ("data.split=9,1", "", "with data.source=stdlib, which is Python's standard library",
     "null, and data.validation_fraction, data.validation.NAME or data.test.NAME"),
    ("data.reset_positions=true", "", "without data.document_mask=true", "false, or that"),
    ("data.fim_spm_rate=0.1, data.fim_tokens=[a, b, c]", "", "without data.fim_rate above 0",
     "0.5 and null, or that"),
    (("data.prompt_field=a, data.completion_field=b, data.messages_field=c, "
      "data.chat_template=d, data.train_on=last"), "", "without data.samples=supervised",
     "prompt, completion, messages, null and all, or that"),
]  # fmt: skip
"""Keys as a line has them, other keys that are given, and the rest of the line: why they have no
effect, and what is expected."""
OTHERWISE = {
    *("context.ulysses", "data.fim_rate", "data.mixture", "model.source"),
    *("optimizer.master", "pipeline.group", "pipeline.pairs", "pipeline.replicas"),
    "pipeline.weights",
}
"""Keys that need others, and without them are refused for another reason than that they have no
effect."""
OF_EXPERTS = {
    *(f"model.moe.{key}" for key in MoEConfig.model_fields if key != "experts"),
    *("experts.dispatch", "parallel.etp"),
}
"""Keys that need experts, of which the table has some."""
TAKEN = [
    "optimizer.momentum=0.5 optimizer.momentum_decay=0.1 optimizer.nesterov=false",
    "optimizer.trust_coefficient=0.1 optimizer.muon_adjust=original optimizer.muon_split=heads",
    "optimizer.adamw_lr_scale=0.5 optimizer.beta1=0.5 optimizer.beta2=0.5 optimizer.rule=sgd",
    "optimizer.offload_folder=x data.cache=x data.workers=1",
    "optimizer.clip_scope=stage optimizer.clip=null pipeline.weights=double_buffer parallel.pp=2",
    "parallel.sequence_parallel=true kernels.overlap=false log.stragglers_every=5",
    "optimizer.zero=3 optimizer.reduce_dtype=bf16 optimizer.reduce_chunk_mib=1",
    "parallel.per_node=4 parallel.node_gb_s=9 parallel.network_gb_s=9 parallel.latency_us=9",
    "run.deterministic=true log.memory_history=true",
    "pipeline.channel_ctas=2 pipeline.receive_ahead=1",
    "train.validate_every=3 train.validation_samples=9 data.validation_fraction=0",
    "experts.dispatch=auto experts.chunks=auto",
    "kernels.rotary=torch kernels.swiglu=torch kernels.experts=loop kernels.expert_rows=torch",
    "data.document_mask=true data.reset_positions=true model.positions=rotary",
    "data.document_mask=true data.samples=packed",
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
    "activations.blocks=1 activations.offload=[norm]",
    "numbers.rewinds=2 numbers.spike_factor=9",
    "pipeline.slice_overhead=1 pipeline.slice_attention=2 pipeline.schedule=terapipe",
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


@pytest.mark.parametrize("given", TAKEN + WITH_EFFECT)
def test_other_keys_are_taken(given: str) -> None:
    resolve(parse(given.split()).config, None, None)


def test_every_key_that_needs_another_is_in_the_table() -> None:
    """By the settings beside which each key of the configuration has another value."""
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
    own = ["model.source=tests.parity.own_models:plain", "model.options.depth=2"]
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
