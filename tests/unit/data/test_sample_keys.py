"""Keys of samples that do not go together, and what their values are refused for."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.data.build import build_batches
from megapipe.data.commands import main as prepare_data
from megapipe.data.prepare.held_out import HeldOut
from megapipe.data.sources import Sources, load_sources
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data.tokenizer.interface import TokenIds
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import ConfigError, DataError
from megapipe.layout.resolve import resolve

FIM = ["data.fim_rate=0.5", "data.fim_tokens=[a, b, c]"]
SUPERVISED = ["data.sample_format=supervised", "data.source=rows.jsonl"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write token files `t`, 20 rows of examples, the last three of which are long, and a
    user-defined data set."""
    monkeypatch.chdir(tmp_path)
    with TokenWriter(Path("t"), token_type(257), 257) as writer:
        writer.add(np.arange(100))
    sizes = [3] * 17 + [30] * 3
    rows = [json.dumps({"prompt": f"{i:2}", "completion": "x" * n}) for i, n in enumerate(sizes)]
    Path("rows.jsonl").write_text("\n".join(rows))
    Path("rows_of_mine.py").write_text(
        "def data(split, sequence_length):\n    return [[1] * 17] * 3\n"
    )


def config(*given: str) -> Config:
    usual = ["train.sequence_length=16", "train.steps=2", "train.global_batch=4"]
    return resolve(parse([*usual, *given]).config, 1, 257)[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            ["data.fim_rate=0.5"],
            "data.fim_rate=0.5 needs data.fim_tokens: expected the names of th",
        ),
        (["data.fim_rate=1", "data.fim_tokens=[a, b, a]"], "expected the names of three tokens"),
        (
            ["data.fim_rate=1", "data.fim_tokens=[a, b]"],
            "data.fim_tokens=[a, b]: expected three nam",
        ),
        (["data.fim_rate=1.5"], "data.fim_rate=1.5: expected a number"),
        (
            ["data.fim_tokens=[a, b, c]"],
            "c] has no effect without data.fim_rate above 0: expected null, or",
        ),
        (
            ["data.fim_spm_rate=1"],
            "data.fim_spm_rate=1.0 has no effect without data.fim_rate above 0: expected 0.5",
        ),
        (
            [*FIM, "data.sample_format=megatron", "data.source=t"],
            "data.fim_rate=0.5: expected data.sample_format=stateless or packed, not megatron, or",
        ),
        ([*FIM, *SUPERVISED], "expected data.sample_format=stateless or packed, not supervised"),
        (
            [*FIM, "data.source=rows_of_mine:data"],
            "data.fim_rate=0.5 has no effect with data.source=rows_of_mine:data, which is a",
        ),
        (
            ["data.loss_turns=last"],
            "data.loss_turns=last has no effect without data.sample_format=supervised: exp",
        ),
        (["data.loss_turns=first"], "data.loss_turns=first: expected"),
        (
            ["data.chat_template=x", "data.sample_format=packed"],
            (
                "data.chat_template=x has no effect without data.sample_format=supervised: "
                "expected null"
            ),
        ),
        (
            ["data.messages_field=x"],
            "data.messages_field=x has no effect without data.sample_format=superv",
        ),
        (
            [*SUPERVISED, "data.text_field=x"],
            "data.text_field=x has no effect with data.sample_format=sup",
        ),
        (
            ["data.sample_format=supervised"],
            (
                "data.sample_format=supervised, and data.source=stdlib has no rows: expected JSON, "
                "parquet"
            ),
        ),
        (
            [
                *("data.sample_format=supervised", "data.mixture.x.source=rows.jsonl"),
                "data.mixture.x.text_field=y",
            ],
            (
                "data.mixture.x.text_field=y has no effect with data.sample_format=supervised: "
                "expected null"
            ),
        ),
        (["data.sample_format=supervised", "data.source=t"], "and data.source=t has no rows"),
        ([*SUPERVISED, "data.validation.x=t"], "and data.validation.x=t has no rows"),
        (
            ["data.sample_format=supervised", "data.source=rows_of_mine:data"],
            (
                "data.sample_format=supervised has no effect with data.source=rows_of_mine:data, "
                "which is"
            ),
        ),
    ],
)
def test_keys_that_do_not_go_together(given: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_the_marks() -> None:
    with pytest.raises(DataError, match=r"tokenizer 'byte' has no token 'a' .* it has: none$"):
        load_sources(config(*FIM, "data.source=t"), ByteTokenizer())
    assert not Path("cache").exists()


def loaded(*given: str) -> tuple[Config, Sources]:
    chosen = config(*SUPERVISED, *given)
    return chosen, load_sources(chosen, ByteTokenizer())


def test_examples_are_packed_and_the_long_ones_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    chosen, sources = loaded("data.validation_fraction=0", "data.test.all=rows.jsonl")
    line = "megapipe: rows.jsonl: 3 of 20 examples are skipped: they are longer than train.seq"
    assert capsys.readouterr().err.count(line) == 2, "of training and of the test"
    training, (test,) = build_batches(chosen, ByteTokenizer(), sources)
    assert len(training) == len(test.batches) == 6, "three of 5 positions in a sample"
    rows = training.rows(range(6))
    assert sorted(rows.labels[rows.mask].tolist()) == [ord("x")] * 51 + [256] * 17
    assert rows.documents is not None
    assert rows.documents.max() == 3
    for tokens, labels, mask in zip(rows.tokens, rows.labels, rows.mask, strict=True):
        assert bytes(tokens[tokens < 256].tolist()).decode().count("xxx") == mask.sum() // 4
        assert (labels[:15][mask[:15]] == tokens[1:][mask[:15]])[:3].all()
    assert sources.entropy is None
    _, sources = loaded("data.validation_fraction=0", "train.sequence_length=64")
    assert "left out" not in capsys.readouterr().err


def test_examples_are_tokenized_ahead_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A run with the same keys finds them."""
    given = ["--sample-format", "supervised", "--source", "rows.jsonl", "--loss-turns", "last"]
    assert prepare_data([*given, "--validation-fraction", "0"]) == 0
    assert "train       20 examples  " in capsys.readouterr().out

    class Barred(ByteTokenizer):
        def encode(self, text: str) -> TokenIds:
            raise AssertionError("tokenized again")

    chosen = config(*SUPERVISED, "data.validation_fraction=0", "data.loss_turns=last")
    assert len(build_batches(chosen, Barred(), load_sources(chosen, Barred()))[0]) == 6
    assert len(list(Path("cache").glob("[0-9a-f]*"))) == 1
    for wrong, words in (
        (
            [*given, "--output", "x"],
            "--sample-format supervised works only with the cache: an --output f",
        ),
        (given[:2], "--source=stdlib has no rows: expected JSON"),
        (given[2:], "data.loss_turns=last has no effect without data.sample_format=supervised: "),
        (
            [*given, "--text-field", "x"],
            "data.text_field=x has no effect with data.sample_format=supervis",
        ),
        (
            ["--sample-format", "some"],
            "--sample-format some: expected one of stateless, packed, megatron, su",
        ),
    ):
        assert prepare_data(wrong) == 2
        assert words in capsys.readouterr().err


def test_a_mixture_of_examples() -> None:
    Path("more.jsonl").write_text(Path("rows.jsonl").read_text().replace("xxx", "yyy"))
    sources = [f"data.mixture.{name}.source={name}.jsonl" for name in ("rows", "more")]
    usual = ["data.sample_format=supervised", "data.validation_fraction=0"]
    chosen = config(*usual, *sources)
    loaded = load_sources(chosen, ByteTokenizer())
    training, _ = build_batches(chosen, ByteTokenizer(), loaded)
    rows = training.rows(range(12))
    for source, letter in ((1, "x"), (2, "y")):
        assert set(rows.labels[rows.mask == source].tolist()) == {ord(letter), 256}


def test_no_example_is_short_enough() -> None:
    chosen, sources = loaded("train.sequence_length=4", "data.validation_fraction=0")
    with pytest.raises(DataError) as refused:
        build_batches(chosen, ByteTokenizer(), sources)
    assert str(refused.value) == (
        "data.source=rows.jsonl has no example of at most train.sequence_length=4 tokens: all "
        "20 are longer: expected a larger train.sequence_length"
    )


LONG = (
    "has no example of at most train.sequence_length=16 tokens: its only one is longer: "
    "expected a larger train.sequence_length"
)
SHORT = (
    "has 1 token from position 100 to 101, but one sample needs 2 (train.sequence_length=16): use "
    "more text"
)
WHOLE = (
    "has no complete document: data.validation_fraction divides the only one with tokens, but "
    "data.sample_format=packed needs complete documents: expected data.validation.NAME, or "
    "data.validation_fraction=0"
)
HALF = "data.validation_fraction=0.5"
MORE = ", or a larger data.validation_fraction, or data.validation.NAME"
MIXED = ["data.mixture.a.source=rows.jsonl", "data.mixture.b.source=one.jsonl"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            [*SUPERVISED, "data.source=two.jsonl", HALF],
            f"the validation part of data.source=two.jsonl ({HALF}) {LONG}{MORE}",
        ),
        (
            [*SUPERVISED, "data.validation.new=one.jsonl"],
            f"data.validation.new=one.jsonl {LONG}",
        ),
        (
            ["data.sample_format=supervised", "data.validation_fraction=0", *MIXED],
            f"data.mixture.b.source=one.jsonl {LONG}",
        ),
        (["data.source=t", "data.sample_format=packed"], f"data.source=t {WHOLE}"),
        (
            ["data.source=t2", "data.split=1,1"],
            f"the validation part of data.source=t2 (data.split=1,1) {SHORT}",
        ),
        (
            ["data.source=t2", "data.sample_format=megatron", HALF],
            f"the validation part of data.source=t2 ({HALF}) {SHORT}{MORE}",
        ),
    ],
)
def test_a_source_that_is_too_short_has_the_name_that_the_user_gave_it(
    given: list[str], line: str
) -> None:
    """The user does not know the name of its file in the cache."""
    rows = [json.dumps({"prompt": "p", "completion": "x" * n}) for n in (3, 30)]
    held_out = HeldOut(0.5, 2)(0, 2).tolist()
    assert sorted(held_out) == [False, True]
    Path("two.jsonl").write_text("\n".join(reversed(rows) if held_out[0] else rows))
    Path("one.jsonl").write_text(rows[1])
    with TokenWriter(Path("t2"), token_type(257), 257) as writer:
        writer.add(np.arange(100))
        writer.add(np.arange(1))
    chosen = config(*given)
    with pytest.raises(DataError) as refused:
        build_batches(chosen, ByteTokenizer(), load_sources(chosen, ByteTokenizer()))
    assert str(refused.value) == line
