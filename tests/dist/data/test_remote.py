"""Sources by URL whose texts several processes tokenize."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.cli import parse
from megapipe.config.data import DataConfig
from megapipe.data.commands import main as prepare_data
from megapipe.data.prepare import prepare
from megapipe.data.prepare.remote_cache import check_contents
from megapipe.data.remote import fetched
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import token_type
from megapipe.errors import DataError
from megapipe.layout.resolve import resolve
from tests.parity.bucket import filled


@pytest.fixture
def store() -> Iterator[Any]:
    with filled() as system:
        yield system


@pytest.mark.parametrize(
    ("source", "place"),
    [
        ("memory://bucket/a", "deep/3.txt"),
        ("memory://bucket/b.txt", "b.txt"),
        ("memory://bucket/**/*.txt", "a/1.txt"),
    ],
)
def test_texts_that_are_damaged_at_the_same_size_are_found_before_they_are_tokenized(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch, source: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    config = fetched(DataConfig(source=source, cache="cache", validation_fraction=0))
    prepare(config, ByteTokenizer(), progress=False)
    (file,) = tmp_path.glob(f"cache/remote-*/files/{place}")
    file.write_bytes(b"x" * file.stat().st_size)
    message = (
        rf"{place} changed after the download: remove cache/remote-\w+ and it is "
        r"downloaded again"
    )
    with pytest.raises(DataError, match=message):
        prepare(config, ByteTokenizer(), progress=False)
    usual = ["--source", source, "--cache", "cache"]
    assert prepare_data([*usual, "--output", "out"]) == 3
    assert prepare_data(["tokenizer", *usual, "--vocab-size", "300", "--output", "new"]) == 3
    file.unlink()
    with pytest.raises(DataError, match=f"{place}: No such file or directory: remove"):
        check_contents(config.source)


def test_a_token_file_and_texts_as_sources_of_a_run(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with TokenWriter(Path("x"), token_type(257), 257) as writer:
        for _ in range(10):
            writer.add(np.arange(10))
    for suffix in ("bin", "idx"):
        store.pipe(f"/bucket/x.{suffix}", Path(f"x.{suffix}").read_bytes())
    given = [
        *("data.mixture.tokens.source=memory://bucket/x", "train.sequence_length=4"),
        *("data.mixture.texts.source=memory://bucket/a", "data.validation.b=memory://bucket/b.txt"),
    ]
    config = resolve(parse(given).config, 1, 257)[0]
    found = load_sources(config, ByteTokenizer(), progress=False)
    assert [found.training[name].part("train").positions for name in ("tokens", "texts")] == [
        range(100),
        range(len("one") + len("two") + len("three") + 3),
    ]
    assert [held_out.name for held_out in found.held_out()] == ["b"]
