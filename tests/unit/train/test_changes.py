"""What may change when a run goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megapipe.cli import flatten, parse
from megapipe.config import Config
from megapipe.errors import CheckpointError
from megapipe.keys import KEYS, SECTIONS
from megapipe.train.changes import HARMLESS, LISTED_OF_MODEL, REFUSED, Change, check, compare

CORPUS = Change("corpus", "a", "b")


def checkpoint(**stored: Any) -> Any:
    """Of a run with the defaults but for ``section__key`` values."""
    given = {key.replace("__", "."): value for key, value in stored.items()}
    manifest = SimpleNamespace(config={**flatten(Config()), **given})
    return SimpleNamespace(path=Path("runs/x/step-1"), manifest=manifest)


def told(*overrides: str, own: bool = True, corpus: Change | None = None) -> list[str]:
    found = check(checkpoint(), parse(overrides).config, own=own, corpus=corpus)
    return [str(change) for change in found.told]


def test_classes_name_keys_that_there_are() -> None:
    for name in (*HARMLESS, *REFUSED, *LISTED_OF_MODEL):
        assert name in KEYS or name.removesuffix(".") in SECTIONS, name


def test_how_and_where_is_harmless() -> None:
    harmless = ["parallel.pp=2", "log.every=7", "pipeline.schedule=zb_h1", "data.source=moved.txt"]
    assert told(*harmless, "train.microbatch=1", "optimizer.zero=3", "train.stop_after=5") == []


def test_how_training_goes_on_is_listed() -> None:
    assert told(
        "optimizer.lr=0.001", "optimizer.clip=null", "model.dropout=0.25", "model.dtype=bf16"
    ) == [
        "model.dropout was 0.0 and is 0.25",
        "model.dtype was fp32 and is bf16",
        "optimizer.lr was 0.0003 and is 0.001",
        "optimizer.clip was 1.0 and is null",
    ]
    assert told("train.global_batch=64", "train.steps=500") == [
        "train.steps was 300 and is 500",
        "train.global_batch was 32 and is 64",
    ]


ANOTHER_RUN = [
    "run.seed=7",
    "train.sequence_length=128",
    "data.document_mask=true",
    "data.mask_document_ends=true",
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


@pytest.mark.parametrize(
    ("override", "anew"),
    [("run.seed=7", True), ("train.sequence_length=8", True), ("data.document_mask=true", False)],
)
def test_where_samples_are_others_the_data_begin_anew(override: str, anew: bool) -> None:
    config = parse([override, "run.resume_changes=allow"]).config
    assert check(checkpoint(), config, own=True, corpus=None).data_anew is anew
    assert check(checkpoint(), Config(), own=False, corpus=CORPUS).data_anew
    assert not check(checkpoint(), Config(), own=False, corpus=None).data_anew


def test_the_update_rule_is_never_another() -> None:
    config = parse(["optimizer.rule=muon", "run.resume_changes=allow"]).config
    with pytest.raises(CheckpointError, match=r"optimizer.rule=adamw, the configuration has muon"):
        check(checkpoint(), config, own=False, corpus=None)


def test_a_key_that_an_older_checkpoint_lacks_had_its_default() -> None:
    manifest = {key: value for key, value in flatten(Config()).items() if key != "optimizer.clip"}
    assert compare(manifest, Config()) == []
    found = compare(manifest, parse(["optimizer.clip=null"]).config)
    assert found == [Change("optimizer.clip", 1.0, None)]
