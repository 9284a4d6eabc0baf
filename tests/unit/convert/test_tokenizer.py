"""Files of a run's tokenizer, as AutoTokenizer reads them: the same ids and the same texts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from megapipe.convert.tokenizer import byte_backend, byte_characters, save_tokenizer
from megapipe.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from tests.unit.data.data_cases import TEXTS, train_bpe

MARK = "<|endoftext|>"
SPELLED = [MARK, f"a {MARK}b", "</s> <s>", "[SEP]", " , 's  .  !  n't", "", "\x00\r\n\u2028\ufeff"]


def written(tokenizer: Tokenizer, name: str, folder: Path) -> Any:
    assert save_tokenizer(tokenizer, name, folder, most_tokens=10**6)
    return AutoTokenizer.from_pretrained(folder)


def random_text(draw: random.Random) -> str:
    """Characters of all planes, most of them of the first ones."""
    ends = draw.choices([0x80, 0x800, 0xD800, 0x110000], k=draw.randrange(40))
    codes = (draw.randrange(end) for end in ends)
    return "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)


def test_bytes_have_the_same_ids_and_the_same_texts(tmp_path: Path) -> None:
    byte = ByteTokenizer()
    theirs = written(byte, "byte", tmp_path)
    assert (len(theirs), theirs.eos_token_id, theirs.bos_token_id) == (257, 256, 256)
    draw = random.Random(11)
    every = [chr(code) for code in range(0x3000)]
    for text in [*SPELLED, *TEXTS, "".join(every), *(random_text(draw) for _ in range(500))]:
        ids = byte.encode(text).tolist()
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    for _ in range(500):  # what a model may say
        ids = draw.choices(range(257), k=draw.randrange(30))
        assert theirs.decode(ids, skip_special_tokens=True) == byte.decode(ids)
    for byte_id in range(256):
        assert theirs.decode([byte_id]) == byte.decode([byte_id])
    assert load_tokenizer(str(tmp_path)).encode(f"x{MARK}").tolist() == list(f"x{MARK}".encode())


def test_the_characters_of_bytes() -> None:
    characters = byte_characters()
    assert len(set(characters)) == 256
    assert (characters[0], characters[ord(" ")], characters[ord("a")]) == ("Ā", "Ġ", "a")
    vocabulary = byte_backend().get_vocab()
    assert vocabulary == {**{c: i for i, c in enumerate(characters)}, MARK: 256}


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    train_bpe(["<pad>", MARK]).save(str(path))
    PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="<pad>").save_pretrained(
        tmp_path / "folder"
    )
    for number, name in enumerate((path, tmp_path / "folder")):
        ours = load_tokenizer(str(name))
        theirs = written(ours, str(name), tmp_path / str(number))
        assert (theirs.eos_token_id, len(theirs)) == (ours.eod, ours.vocab_size)
        for text in TEXTS:
            assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text).tolist()


def test_a_tokenizer_written_in_python(tmp_path: Path) -> None:
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "own")
    ours = load_tokenizer(str(tmp_path / "own"))
    theirs = written(ours, str(tmp_path / "own"), tmp_path / "files")
    for text in TEXTS[:5]:
        assert theirs(text, add_special_tokens=False).input_ids == ours.encode(text).tolist()
    assert theirs.eos_token_id == ours.eod


def test_an_encoding_of_tiktoken_has_no_files(tmp_path: Path) -> None:
    tiktoken = pytest.importorskip("tiktoken")
    from megapipe.data.tokenizer.of_tiktoken import TiktokenTokenizer

    ranks = {bytes([i]): i for i in range(256)}
    encoding = tiktoken.Encoding(
        "tiny", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={MARK: 256}
    )
    assert not save_tokenizer(TiktokenTokenizer(encoding), "tiktoken:tiny", tmp_path, 16)
    assert list(tmp_path.iterdir()) == []
