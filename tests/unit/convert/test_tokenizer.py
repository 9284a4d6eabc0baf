"""Files of a run's tokenizer, as AutoTokenizer reads them: the same ids and the same texts."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tokenizers import processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from megapipe.convert import export
from megapipe.convert.tokenizer import (
    SAMPLES,
    byte_backend,
    byte_characters,
    opens_documents,
    save_tokenizer,
)
from megapipe.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from megapipe.generate.generator import Generator
from megapipe.inference.source import ModelInfo
from megapipe.model.gpt.hf.config import row_of
from tests.parity.converted import write_checkpoint
from tests.parity.reference import init_random
from tests.unit.data.data_cases import TEXTS, train_bpe
from tests.unit.model.transformers_models import CASES, FAMILIES, model_of

MARK = "<|endoftext|>"
FAMILIES_BY_TYPE = list(
    {row_of(model_of(case)).model_type: case for case in (*CASES, *FAMILIES)}.values()
)
SPELLED = [MARK, f"a {MARK}b", "</s> <s>", "[SEP]", " , 's  .  !  n't", "", "\x00\r\n\u2028\ufeff"]


def written(tokenizer: Tokenizer, name: str, folder: Path) -> Any:
    assert save_tokenizer(tokenizer, name, folder, most_tokens=10**6)
    return AutoTokenizer.from_pretrained(folder)


def random_text(draw: random.Random) -> str:
    """Draw characters of all planes, most of them of the first ones."""
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


def bare(path: Path) -> None:
    train_bpe(["<pad>", "<s>", "</s>"]).save(str(path))


def with_places(path: Path) -> None:
    """Write a tokenizer with the post-processor of GPT-2."""
    backend = train_bpe(["</s>"])
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    backend.save(str(path))


def with_marks(path: Path) -> None:
    """Write a tokenizer that puts <s> before a text and </s> after it, as BERT's does."""
    backend = train_bpe(["<s>", "</s>"])
    pair = [(mark, backend.token_to_id(mark)) for mark in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=pair
    )
    backend.save(str(path))


@pytest.mark.parametrize("make", [None, bare, with_places, with_marks])
def test_an_export_begins_a_text_as_generate_does(make: Any, tmp_path: Path) -> None:
    model = model_of("llama").model_copy(update={"dtype": "fp32", "vocab_size": 330, "layers": 1})
    checkpoint = write_checkpoint(tmp_path / "run", model, init_random(model, 5, torch.float32))
    name, warned = "byte", list[str]()
    if make is not None:
        make(tmp_path / "tokenizer.json")
        name = str(tmp_path / "tokenizer.json")
    export(checkpoint, tmp_path / "hf", tokenizer=name, warn=warned.append)
    assert warned == []
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf")
    source = ModelInfo.of(checkpoint, tokenizer=name, context=16)
    generator = Generator(cast(Any, SimpleNamespace(source=source)))
    for text in (*TEXTS, *SAMPLES, ""):
        assert theirs(text).input_ids == list(generator.prompt(text).ids)
    assert theirs("a", "b").input_ids == theirs("a").input_ids + theirs("b").input_ids
    opened = load_tokenizer(str(tmp_path / "hf"))
    assert cast(Any, opened).bos_tokens == source.opening, "generate begins so with the folder too"


def test_one_that_cannot_begin_so_is_told(tmp_path: Path) -> None:
    ByT5Tokenizer(extra_ids=0).save_pretrained(tmp_path / "own")
    model = model_of("llama").model_copy(update={"dtype": "fp32", "vocab_size": 330, "layers": 1})
    checkpoint = write_checkpoint(tmp_path / "run", model, init_random(model, 5, torch.float32))
    warned: list[str] = []
    export(checkpoint, tmp_path / "hf", tokenizer=str(tmp_path / "own"), warn=warned.append)
    (line,) = warned
    assert line.endswith("call it with add_special_tokens=False, and put token 1 before the ids")
    assert not opens_documents(load_tokenizer(str(tmp_path / "own")), tmp_path / "hf")


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


@pytest.mark.parametrize("case", FAMILIES_BY_TYPE)
def test_auto_tokenizer_beside_a_config_of_each_family(case: str, tmp_path: Path) -> None:
    """It has the same ids, or the export says that it has not."""
    model = model_of(case).model_copy(update={"dtype": "fp32", "vocab_size": 330, "layers": 1})
    checkpoint = write_checkpoint(tmp_path / "run", model, init_random(model, 5, torch.float32))
    path = tmp_path / "tokenizer.json"
    train_bpe(["<pad>", MARK]).save(str(path))
    for name in ("byte", str(path)):
        output, warned = tmp_path / f"hf_{Path(name).stem}", []
        export(checkpoint, output, tokenizer=name, warn=warned.append)
        ours, theirs = load_tokenizer(name), AutoTokenizer.from_pretrained(output)
        equal = all(
            theirs(text, add_special_tokens=False).input_ids == ours.encode(text).tolist()
            for text in [*TEXTS, *SAMPLES]
        )
        if equal:
            assert warned == []
        else:
            (line,) = warned
            assert f"AutoTokenizer has its own class for {row_of(model).model_type}" in line
            theirs = PreTrainedTokenizerFast.from_pretrained(output)
            for text in [*TEXTS, *SAMPLES]:
                assert theirs(text).input_ids == [ours.eod, *ours.encode(text).tolist()]
        known = {"gpt2": True, "llama": True, "qwen3": True, "qwen2": False}  # see docs/models.md
        assert equal == known.get(row_of(model).model_type, equal)
