"""Tokens that are not those that were written are found when they are read."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megapipe.config.data import DataConfig
from megapipe.data.dataset import TokenDataset
from megapipe.data.prepare import prepare
from megapipe.data.stored import crc_of, write_checksums
from megapipe.data.stored.checksums import BLOCK
from megapipe.data.tokenizer import load_tokenizer
from megapipe.data.tokens import TokenFile, TokenWriter
from megapipe.data.tokens.format import bin_of, token_type
from megapipe.data.tokens.verify import verify
from megapipe.errors import DataError

PER_BLOCK = BLOCK // 2
IDS = np.arange(3 * PER_BLOCK + 5) % 251


def written(prefix: Path) -> Path:
    """Write a token file of three blocks and a short one."""
    with TokenWriter(prefix, token_type(257), 257) as writer:
        writer.add(IDS)
    write_checksums(bin_of(prefix))
    return prefix


def overwrite(prefix: Path, at: int) -> None:
    with open(bin_of(prefix), "r+b") as file:
        file.seek(2 * at)
        file.write(b"\x07")


def test_reads_are_those_of_the_whole_file_wherever_they_begin(tmp_path: Path) -> None:
    prefix = written(tmp_path / "x")
    places = [0, 1, 7, PER_BLOCK - 1, PER_BLOCK, PER_BLOCK + 1, 2 * PER_BLOCK, len(IDS) - 1]
    for checked in (True, False):
        if not checked:
            crc_of(bin_of(prefix)).unlink()
        file = TokenFile(prefix)
        for _ in range(2):
            for start in places:
                for stop in [*(p for p in places if p >= start), len(IDS)]:
                    assert np.array_equal(file.read(start, stop), IDS[start:stop])
        for start, stop in ((-1, 3), (5, 4), (0, len(IDS) + 1)):
            with pytest.raises(DataError, match="names tokens outside"):
                file.read(start, stop)


@pytest.mark.parametrize("at", [0, PER_BLOCK - 1, PER_BLOCK, 3 * PER_BLOCK + 4])
def test_an_overwritten_block_is_found_and_no_other(tmp_path: Path, at: int) -> None:
    prefix = written(tmp_path / "x")
    overwrite(prefix, at)
    block = at // PER_BLOCK * BLOCK
    words = f"x.bin is damaged: bytes {block} to "
    file = TokenFile(prefix)
    for number in range(4):
        first = number * PER_BLOCK
        if first * 2 == block:
            with pytest.raises(DataError, match=words):
                file.read(first, first + 1)
            with pytest.raises(DataError, match=words):
                file.read(first, first + 1)
        else:
            assert file.read(first, first + 2).tolist() == IDS[first : first + 2].tolist()
    with pytest.raises(DataError, match=words):
        verify(TokenFile(prefix), 257)


def test_a_file_that_is_truncated_while_it_is_open_is_a_line_and_no_signal(tmp_path: Path) -> None:
    for prefix in (written(tmp_path / "x"), written(tmp_path / "y")):
        if prefix.name == "y":
            crc_of(bin_of(prefix)).unlink()
        dataset = TokenDataset(TokenFile(prefix), 100)
        os.truncate(bin_of(prefix), 100)
        with pytest.raises(DataError, match=f"{prefix.name}.bin ends at byte 100: was it trunc"):
            dataset.labelled(len(dataset) - 1)


def test_checksums_of_another_size_are_refused(tmp_path: Path) -> None:
    prefix = written(tmp_path / "x")
    os.truncate(crc_of(bin_of(prefix)), 12)
    with pytest.raises(DataError, match=r"x.crc has 12 bytes, 4 blocks need 16"):
        TokenFile(prefix)


def test_a_cache_stands_for_the_order_of_its_tokens_too(tmp_path: Path) -> None:
    """The same bytes in another order have the same counts, sizes and entropy."""
    contents, words = (
        set(),
        ["one", "two", "three", "four", "five", "six"],
    )
    for number, order in enumerate((words, words[::-1], words)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "text.txt").write_text(" ".join(order) * 20)
        config = DataConfig(source=str(folder / "text.txt"), cache=str(folder / "cache"))
        made = prepare(config, load_tokenizer("byte"), progress=False)
        contents.add(made.content)
        train = made.part("train")
        assert train is not None
        assert crc_of(train.file.path).exists()
        assert made.meta.files[f"{train.file.prefix.name}.crc"] == 4
    assert len(contents) == 2
    files = {name: n for name, n in made.meta.files.items() if not name.endswith(".idx.crc")}
    assert len(files) == len(made.meta.files) - 2, "of train and validation"
    older = made.meta.model_copy(update={"files": files})
    assert replace(made, meta=older).content == made.content
    older = older.model_copy(update={"tokens": None})
    before = older.model_dump_json(exclude={"source", "tokenizer", "tokens", "rows"}).encode()
    assert replace(made, meta=older).content == hashlib.sha256(before).hexdigest()
    overwrite(train.file.prefix, 3)
    again = prepare(config, load_tokenizer("byte"), progress=False).part("train")
    assert again is not None
    with pytest.raises(DataError, match="or remove its cache folder and it is rebuilt"):
        TokenDataset(again.file, 10).labelled(0)
