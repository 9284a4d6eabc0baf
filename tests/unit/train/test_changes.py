"""What may change when a run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megapipe.cli import flatten, parse
from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.config.old_names import stored_with_new_names
from megapipe.config.section import OnResume, rules_of
from megapipe.errors import CheckpointError
from megapipe.train.corpus import change_of_corpus
from megapipe.train.resume.changes import (
    MIXTURE,
    TEMPERATURE,
    Change,
    check,
    check_weights,
    compare,
)

CORPUS = Change("corpus", "a", "b", OnResume.ORDER)
MUON = {
    "optimizer.rule": "muon",
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-8,
    "optimizer.momentum": 0.9,
    "optimizer.nesterov": True,
    "optimizer.muon_adjust": "match_rms_adamw",
    "optimizer.adamw_lr_scale": 1.0,
}
"""Keys of a checkpoint of version 0.1, which had no optimizer.muon_split."""


def checkpoint(**stored: Any) -> Any:
    """Make the checkpoint of a run with the defaults but for ``section__key`` values."""
    given = {key.replace("__", "."): value for key, value in stored.items()}
    manifest = SimpleNamespace(config={**flatten(Config()), **given})
    return SimpleNamespace(path=Path("runs/x/step-1"), manifest=manifest)


def told(*overrides: str, own: bool = True, corpus: Change | None = None) -> list[str]:
    found = check(checkpoint(), parse(overrides).config, own=own, corpus=corpus)
    return [str(change) for change in found.to_report]


def test_every_key_of_the_data_has_a_class_of_its_own() -> None:
    """A new one is listed until somebody has thought about it; here that is asked for."""
    fields = DataConfig.model_fields
    silent = {f"data.{key}" for key, info in fields.items() if not rules_of(info, OnResume)}
    assert silent == {MIXTURE, TEMPERATURE}


def test_how_and_where_is_harmless() -> None:
    harmless = ["parallel.pp=2", "log.every=7", "pipeline.schedule=zb_h1", "data.source=moved.txt"]
    harmless += [
        "context.ulysses=2",
        "context.algorithm=all_gather",
        "context.position_split=striped",
    ]
    assert told(*harmless, "train.microbatch=1", "optimizer.zero=3", "train.stop_after=5") == []


def test_settings_of_experts_that_change_the_result_are_told() -> None:
    changed = [
        "experts.wire_dtype=int8",
        "experts.link_bandwidths=[8,2]",
        "model.moe.num_experts=4",
    ]
    harmless = ["experts.dispatch=fetch", "experts.overlap_chunks=3", "experts.ranks_per_node=4"]
    stored = checkpoint(model__moe__num_experts=4)
    found = check(stored, parse([*changed, *harmless]).config, own=True, corpus=None)
    lines = [str(change) for change in found.to_report]
    assert [line.partition(" was ")[0] for line in lines] == [
        "experts.wire_dtype",
        "experts.link_bandwidths",
    ]
    assert lines[0] == "experts.wire_dtype was none and is int8"


@pytest.mark.parametrize(
    ("topology", "scope", "listed"),
    [
        (
            [8.0, 4.0, 1.0],
            "sequence",
            ["parallel.ep", "experts.ranks_per_node", "train.microbatch"],
        ),
        ([8.0, 1.0], "sequence", ["parallel.ep", "train.microbatch"]),
        (None, "microbatch", ["train.microbatch"]),
        (None, "sequence", []),
    ],
)
def test_what_a_balance_term_goes_by_is_told(
    topology: list[float] | None, scope: str, listed: list[str]
) -> None:
    """They are ranks, nodes and micro-batches, where it depends on them."""
    same = ["model.moe.num_experts=8", f"model.moe.aux_loss_scope={scope}"]
    same.append(f"experts.link_bandwidths={'null' if topology is None else topology}")
    before, now = (
        parse(
            [
                *same,
                f"parallel.ep={ep}",
                f"experts.ranks_per_node={node}",
                f"train.microbatch={size}",
            ]
        )
        for ep, node, size in ((4, 2, 4), (8, 4, 1))
    )
    stored = checkpoint(**flatten(before.config))
    found = check(stored, now.config, own=True, corpus=None).to_report
    assert {change.key for change in found} == set(listed)


def test_biases_may_move_at_another_rate_and_stay() -> None:
    """They may not come or go."""
    stored = checkpoint(model__moe__num_experts=4, model__moe__bias_update_rate=0.001)
    for rate in (0.0, 0.01):
        given = ["model.moe.num_experts=4", f"model.moe.bias_update_rate={rate}"]
        (line,) = check(stored, parse(given).config, own=True, corpus=None).to_report
        assert str(line) == f"model.moe.bias_update_rate was 0.001 and is {rate}"
    with pytest.raises(
        CheckpointError, match=r"model\.moe\.bias_update_rate was 0.001 and is null"
    ):
        check(stored, parse(["model.moe.num_experts=4"]).config, own=True, corpus=None)


def test_experts_of_each_layer_stay_as_they_are() -> None:
    stored = checkpoint(model__moe__num_experts="[4, 8, 8, 8]")
    other, one = (parse([f"model.moe.num_experts={n}"]).config for n in ("[4,8,8,4]", "8"))
    with pytest.raises(
        CheckpointError, match=r"num_experts was '.4, 8, 8, 8.' and is '.4, 8, 8, 4.'"
    ):
        check(stored, other, own=True, corpus=None)
    with pytest.raises(CheckpointError, match=r"moe.num_experts is 8, stored is '.4, 8, 8, 8.'"):
        check_weights(Path("x"), stored.manifest.config, one)


def test_how_training_goes_on_is_listed() -> None:
    assert told(
        "optimizer.lr=0.001",
        "optimizer.max_grad_norm=null",
        "model.dropout=0.25",
        "model.dtype=bf16",
    ) == [
        "model.dropout was 0.0 and is 0.25",
        "model.dtype was fp32 and is bf16",
        "optimizer.lr was 0.0003 and is 0.001",
        "optimizer.max_grad_norm was 1.0 and is null",
    ]
    assert told("train.global_batch=64", "train.steps=500") == [
        "train.steps was 300 and is 500",
        "train.global_batch was 32 and is 64",
    ]


ANOTHER_RUN = [
    "run.seed=7",
    "train.sequence_length=128",
    "data.document_mask=true",
    "data.eod_mask_loss=true",
    "data.reset_position_ids=true",
    "data.sample_format=packed",
    "data.fim_rate=0.5",
    "data.fim_spm_rate=1.0",
    "data.fim_tokens=[a, b, c]",
    "train.loss_function=my_loss:loss",
]


@pytest.mark.parametrize("override", [*ANOTHER_RUN, "model.layers=3", "model.norm=rmsnorm"])
def test_another_run_is_refused_or_listed(override: str) -> None:
    key = override.partition("=")[0]
    with pytest.raises(CheckpointError, match=rf"another run: {key} was .*resume_changes=allow"):
        told(override)
    assert told(override, "run.resume_changes=allow")[0].startswith(f"{key} was ")
    if override in ANOTHER_RUN:
        assert told(override, own=False)[0].startswith(f"{key} was "), "a new run may"
    else:
        with pytest.raises(CheckpointError):
            told(override, own=False)


def test_several_are_refused_in_one_line() -> None:
    with pytest.raises(CheckpointError) as caught:
        told("run.seed=7", "data.document_mask=true", corpus=CORPUS)
    text = str(caught.value)
    assert "run.seed was 1234 and is 7; data.document_mask was false and is true; " in text
    assert "corpus was a and is b; " in text


def test_another_corpus() -> None:
    with pytest.raises(CheckpointError, match="another run: corpus was a and is b"):
        told(corpus=CORPUS)
    assert told(own=False, corpus=CORPUS) == ["corpus was a and is b"]
    assert told("run.resume_changes=allow", corpus=CORPUS) == ["corpus was a and is b"]


def test_keys_that_may_have_made_it_another_corpus_are_named_with_it() -> None:
    """They are harmless where it comes out the same."""
    read = ["data.loss_turns=last", "data.validation_fraction=0.5", "data.cache=elsewhere"]
    assert told(*read) == []
    why = "data.validation_fraction was 0.02 and is 0.5, data.loss_turns was all and is last"
    with pytest.raises(CheckpointError, match=rf"corpus was a and is b \({why}\); change back"):
        told(*read, corpus=CORPUS)


def test_another_mixture_goes_on_unless_its_order_is_made_for_all_of_the_run() -> None:
    def mixed(*sources: tuple[str, str, float]) -> list[str]:
        return [
            text
            for name, source, weight in sources
            for text in (
                f"data.mixture.{name}.source={source}",
                f"data.mixture.{name}.weight={weight}",
            )
        ]

    stored = flatten(parse(mixed(("a", "x", 1.0), ("b", "y", 2.0))).config)["data.mixture"]
    before = checkpoint(data__mixture=stored, data__sample_format="megatron")
    for now, refused in (
        (mixed(("a", "x", 1.0), ("b", "y", 3.0)), "data.mixture was"),
        (mixed(("b", "y", 2.0), ("a", "x", 1.0)), "data.mixture was"),
        (
            [*mixed(("a", "x", 1.0), ("b", "y", 2.0)), "data.temperature=2"],
            "data.temperature was 1.0 and is 2.0",
        ),
        (mixed(("a", "moved", 1.0), ("b", "y", 2.0)), None),
    ):
        config = parse([*now, "data.sample_format=megatron"]).config
        if refused is None:
            assert not check(before, config, own=True, corpus=None).data_anew
            continue
        with pytest.raises(CheckpointError, match=f"another run: {refused}"):
            check(before, config, own=True, corpus=None)
        allowed = parse([*now, "data.sample_format=megatron", "run.resume_changes=allow"]).config
        assert check(before, allowed, own=True, corpus=None).data_anew
        goes_on = check(checkpoint(data__mixture=stored), parse(now).config, own=True, corpus=None)
        assert len(goes_on.to_report) == 1
        assert not goes_on.data_anew


def test_another_tokenizer_of_a_token_file_is_refused() -> None:
    """Ids in the file stay what they are; the mark of documents' ends may not."""
    config: Any = {"data.tokenizer": "old", "data.source": "t", "data.mixture": "{}"}
    digests = {"corpus": "c", "content": "d" * 64, "tokenizer": "e" * 64}
    before: Any = SimpleNamespace(manifest=SimpleNamespace(config=config, digests=digests))
    data = parse(["data.source=t", "data.tokenizer=new"]).config.data

    def change(content: str, tokenizer: str) -> Change | None:
        prepared: Any = SimpleNamespace(digest="f", content=content, tokenizer=tokenizer)
        return change_of_corpus(before, prepared, data)

    assert change("d" * 64, "e" * 64) is None
    found = change("d" * 64, "f" * 64)
    assert found == Change("tokenizer", "old (eeeeeeee)", "new (ffffffff)", OnResume.REFUSED)
    with pytest.raises(
        CheckpointError, match=r"another run: tokenizer was old \(eeeeeeee\) and is"
    ):
        told(corpus=found)
    assert told("run.resume_changes=allow", corpus=found) == [str(found)]
    allowed = parse(["run.resume_changes=allow"]).config
    assert not check(checkpoint(), allowed, own=True, corpus=found).data_anew
    digests.pop("tokenizer")
    assert change("d" * 64, "f" * 64) is None, "a checkpoint from before tokenizers were noted"
    config["data.mixture"] = '{"web": {"source": "w"}, "code": {"source": "c"}}'
    assert change("a" * 64, "") == Change(
        "corpus", "web=w, code=c (dddddddd)", "t (aaaaaaaa)", OnResume.ORDER
    )


@pytest.mark.parametrize(
    ("override", "anew"),
    [
        ("run.seed=7", True),
        ("train.sequence_length=8", True),
        ("data.fim_rate=0.5", True),
        ("data.document_mask=true", False),
    ],
)
def test_where_samples_are_others_the_data_begin_anew(override: str, anew: bool) -> None:
    config = parse([override, "run.resume_changes=allow"]).config
    assert check(checkpoint(), config, own=True, corpus=None).data_anew is anew
    assert check(checkpoint(), Config(), own=False, corpus=CORPUS).data_anew
    assert not check(checkpoint(), Config(), own=False, corpus=None).data_anew


def test_the_update_rule_is_never_another() -> None:
    config = parse(["optimizer.rule=muon", "run.resume_changes=allow"]).config
    with pytest.raises(
        CheckpointError, match=r"optimizer.rule=adamw, but the configuration has muon"
    ):
        check(checkpoint(), config, own=False, corpus=None)


def test_a_key_that_an_older_checkpoint_lacks_had_its_default() -> None:
    manifest = {
        key: value for key, value in flatten(Config()).items() if key != "optimizer.max_grad_norm"
    }
    assert compare(manifest, Config()) == []
    muon = parse(["optimizer.rule=muon"]).config
    before = stored_with_new_names(MUON)
    (change,) = (each for each in compare(before, muon) if each.key == "optimizer.options")
    stored, now = json.loads(change.stored), json.loads(change.now)
    assert stored.keys() == now.keys()
    changed = {key for key, value in now.items() if stored[key] != value}
    assert {key: (stored[key], now[key]) for key in changed} == {
        "split_qkv": ("none", "projections")
    }
    assert "optimizer.options" not in {each.key for each in compare({}, Config())}
    found = compare(manifest, parse(["optimizer.max_grad_norm=null"]).config)
    assert found == [Change("optimizer.max_grad_norm", 1.0, None)]
