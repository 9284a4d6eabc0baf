"""User-defined data sets: what they are given, what they may return, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.cli import parse
from megapipe.config.config import Config
from megapipe.data import commands
from megapipe.data.batch import Batches
from megapipe.data.build import build_batches
from megapipe.data.order import order
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data.user_dataset import ARGUMENTS, UserDataset, own_data
from megapipe.errors import ConfigError, DataError
from megapipe.layout.resolve import resolve
from megapipe.util.user_code import is_source

L, EOD = 4, 256
MODULE = """
import numpy as np
import torch

seen = []


def counting(split, sequence_length):
    first = 0 if split == "train" else 100
    return [list(range(first + i, first + i + sequence_length + 1)) for i in range(10)]


def everything(**given):
    seen.append(given)
    return counting(given["split"], given["sequence_length"])


class Tensors:
    def __init__(self, split, *, sequence_length=0, seed=None):
        self.length = sequence_length

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.full((self.length + 1,), i, dtype=torch.uint8)


def triples(split):
    tokens = np.array([1, 2, 256, 3], dtype=np.uint16)
    labels = torch.tensor([7, -100, 8, 256])
    return [(tokens, labels, [True, False, True, True])]


def one(sample):
    return lambda split: [sample]


short = one([1, 2, 3, 4])
long = one(np.arange(6))
flat = one(3)
nested = one([[1, 2, 3, 4, 5]])
floats = one([1.0, 2, 3, 4, 5])
ragged = one([[1], [2, 3]])
words = one("abcde")
pair = one(([1, 2, 3, 4], [2, 3, 4, 5]))
ints = one((1, 2, 3))
counts = one(([1, 2, 3, 4], [2, 3, 4, 5], [1, 1, 1, 1]))
outside = one([1, 2, 3, 257, 4])
last_outside = one([1, 2, 3, 4, -1])
label_outside = one(([1, 2, 3, 4], [2, 300, 300, 5], [True, False, True, True]))


def empty(split):
    return [] if split == "validation" else [[1, 2, 3, 4, 5]]


def stream(split):
    return iter([[1, 2, 3, 4, 5]])


def nothing(split):
    pass


class Odd(Tensors):
    def __len__(self):
        raise RuntimeError("who knows")


class Failing(Tensors):
    def __getitem__(self, i):
        return {}[i]


def fails(split):
    raise OSError("no disk")


def unsplit(sequence_length):
    return []


def asks(split, path):
    return []
"""


@pytest.fixture(autouse=True)
def _sets(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("sets")
    (folder / "sets.py").write_text(MODULE)
    monkeypatch.chdir(folder)
    yield
    sys.modules.pop("sets", None)


def config(name: str, *overrides: str) -> Config:
    given = [f"data.source=sets:{name}", f"train.sequence_length={L}", *overrides]
    return resolve(parse(given).config, 1, 257)[0]


def made(name: str, *overrides: str) -> UserDataset:
    return own_data(
        config(name, *overrides), f"sets:{name}", ByteTokenizer(), ("train", "validation")
    )


def batches(name: str, *overrides: str) -> tuple[Batches, Batches]:
    chosen = config(name, *overrides)
    train, (held_out,) = build_batches(
        chosen, ByteTokenizer(), load_sources(chosen, ByteTokenizer())
    )
    return train, held_out.batches


def test_rows_of_windows_in_the_order_of_a_corpus() -> None:
    train, validation = batches("counting", "run.seed=5")
    for number in (0, 3, 17):
        tokens, labels, mask = train.rows([number])[:3]
        first = order(5, 10, number)
        assert tokens.tolist() == [list(range(first, first + L))]
        assert torch.equal(labels, tokens + 1)
        assert mask.all()
    tokens, _, mask = validation.rows(range(12))[:3]
    assert tokens[:10, 0].tolist() == [100 + order(0, 10, i) for i in range(10)]
    assert not mask[10:].any()


def test_rows_of_triples() -> None:
    """What is masked may have any label."""
    for more in ("data.eod_mask_loss=false", "data.eod_mask_loss=true"):
        tokens, labels, mask = batches("triples", more)[0].rows([0])[:3]
        assert tokens.tolist() == [[1, 2, 256, 3]]
        assert labels.tolist() == [[7, EOD, 8, 256]]
        assert mask.tolist() == [[True, False, True, more.endswith("false")]]


def test_tensors_of_any_integer_type() -> None:
    tokens, labels, _ = batches("Tensors")[0].rows([0, 1, 2])[:3]
    assert sorted(tokens[:, 0].tolist()) == [0, 1, 2]
    assert tokens.dtype == labels.dtype == torch.int64


def test_code_is_given_all_that_it_may_take() -> None:
    made("everything", "run.seed=7", "model.vocab_size=300")
    splits = sys.modules["sets"].seen
    assert [given["split"] for given in splits] == ["train", "validation"]
    for given in splits:
        assert tuple(given) == ARGUMENTS
        assert (given["sequence_length"], given["vocab_size"], given["seed"]) == (L, 300, 7)
        assert given["tokenizer"].eod == EOD


def test_a_digest_follows_the_samples() -> None:
    same = made("counting")
    assert same.content == made("everything").content == same.digest
    assert same.content != made("counting", "train.sequence_length=5").content
    sys.modules["sets"].counting = lambda split, sequence_length: [
        list(range(i, i + sequence_length + 1)) for i in range(10)
    ]
    assert same.content != made("counting").content, "other held-out samples"
    assert same.entropy is None


def test_a_file_of_that_name_is_a_corpus() -> None:
    assert is_source("sets:counting")
    Path("sets:counting").write_text("text")
    assert not is_source("sets:counting")
    for other in ("stdlib", "a/b", "https://x.org/y", "sets:", "corpus.txt", "s3://a:b"):
        assert not is_source(other)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("short", r"sample 0 of split train has token ids int64 \[4\]: expected integers \[5\]"),
        ("long", r"has token ids int64 \[6\]: expected integers \[5\], train.sequence_length=4 a"),
        ("flat", r"has token ids int64 \[\]"),
        ("nested", r"has token ids int64 \[1, 5\]"),
        ("floats", r"has token ids float64 \[5\]: expected integers"),
        ("ragged", r"sample 0 of split train: ValueError: "),
        ("words", r"has token ids <U5 \[\]"),
        ("pair", "sample 0 of split train is a tuple of 2: expected tokens, labels and mask"),
        ("ints", r"has tokens int64 \[\]: expected integers \[4\], train.sequence_length=4$"),
        ("counts", r"has mask int64 \[4\]: expected booleans \[4\]"),
        ("empty", "its split validation is empty: expected one sample or more"),
        ("stream", r"it returned list_iterator for split train: expected a data set with len\(\)"),
        ("nothing", "it returned NoneType for split train"),
        ("Odd", r"len\(\) of split train: RuntimeError: who knows \(sets.py, line \d+\)"),
        ("Failing", r"sample 0 of split train: KeyError: 0 \(sets.py, line \d+\)"),
        ("fails", r"OSError: no disk \(sets.py, line \d+\)"),
    ],
)
def test_what_is_no_data_set_is_one_line(name: str, message: str) -> None:
    with pytest.raises(DataError, match=f"^data.source=sets:{name}: .*{message}") as caught:
        made(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("outside", "token id 257 at position 3 of sample 0 of split train of data.source=sets:o"),
        ("last_outside", "token id -1 at label 3 of sample 0"),
        ("label_outside", "token id 300 at label 2 of sample 0 of split validation"),
    ],
)
def test_ids_outside_the_vocabulary(name: str, message: str) -> None:
    chosen = batches(name)["validation" in message]
    with pytest.raises(DataError, match=rf"^{message}.* is outside the vocabulary \(0 to 256\)$"):
        chosen.rows([0])


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("missing", [], "module 'sets' has no function 'missing'"),
        ("unsplit", [], "the function has no parameter split .train or validation."),
        ("asks", [], "its parameter path needs a default; it can be given split, sequence_length"),
        ("counting", ["data.subset=en"], "data.subset=en has no effect with .*: expected null"),
        (
            "counting",
            ["data.text_field=x"],
            "data.text_field=x has no effect with .*: expected text",
        ),
        (
            "counting",
            ["data.validation_fraction=0.1"],
            "data.validation_fraction=0.1 has no effect",
        ),
    ],
)
def test_what_can_be_known_is_refused_before_a_start(
    name: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f": {message}"):
        config(name, *overrides)


def test_there_is_nothing_to_prepare(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["--source", "sets:counting"]) == ConfigError.exit_code
    assert "already has token ids" in capsys.readouterr().err


def test_a_larger_vocabulary_has_the_same_ids() -> None:
    for chosen in batches("outside", "model.vocab_size=258"):
        assert chosen.rows([0])[1].tolist() == [[2, 3, 257, 4]]


def test_samples_are_asked_for_by_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    train, _ = batches("Tensors")
    samples = train.sources[0].dataset._samples  # type: ignore[attr-defined]
    get = type(samples).__getitem__
    monkeypatch.setattr(type(samples), "__getitem__", lambda s, i: asked.append(i) or get(s, i))
    train.rows(range(3))
    assert {type(i) for i in asked} == {int}
