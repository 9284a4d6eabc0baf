import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from megapipe.data.tokenizer import ByteTokenizer, load_tokenizer
from megapipe.data.tokenizer.hugging_face import FastTokenizer, of_transformers
from megapipe.errors import DataError
from tests.unit.data.data_cases import TEXTS, train_bpe


def test_bytes_round_trip() -> None:
    tokenizer = load_tokenizer("byte")
    assert isinstance(tokenizer, ByteTokenizer)
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    for text in [*TEXTS, "", "\x00\r\n", "日本語 🙂"]:
        assert tokenizer.encode(text).tolist() == list(text.encode())
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_bytes_decode_what_a_model_may_say() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([0xC3, 0x28, 256, 65, 300]) == "\ufffd(A"
    assert tokenizer.decode(tokenizer.encode("a\udcffb").tolist()) == "a?b"


def test_a_lone_surrogate_is_read_as_a_question_mark(bpe_file: Path) -> None:
    """All tokenizers read it as the byte tokenizer does."""
    fast = load_tokenizer(str(bpe_file))
    text, plain = "a \ud83d b \ude42\udcff", "a ? b ??"
    for tokenizer in (ByteTokenizer(), fast, of_transformers(ByT5Tokenizer(), "byt5")):
        assert tokenizer.encode(text).tolist() == tokenizer.encode(plain).tolist()
        if tokenizer is not fast:
            continue
        placed, of_plain = fast.encode_rendered(text), fast.encode_rendered(plain)
        for found, expected in zip(placed, of_plain, strict=True):
            assert found.tolist() == expected.tolist()


def test_file_and_folder_and_folder_without_config(bpe_file: Path, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(
        tokenizer_file=str(bpe_file), eos_token="<|endoftext|>"
    ).save_pretrained(tmp_path / "full")
    (tmp_path / "bare").mkdir()
    shutil.copy(bpe_file, tmp_path / "bare" / "tokenizer.json")
    reference = train_bpe(["<pad>", "<|endoftext|>"])
    for source in (bpe_file, tmp_path / "full", tmp_path / "bare"):
        tokenizer = load_tokenizer(str(source))
        assert tokenizer.vocab_size == reference.get_vocab_size()
        assert tokenizer.eod == reference.token_to_id("<|endoftext|>") == 1
        assert [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)] == [
            reference.encode(text, add_special_tokens=False).ids for text in TEXTS
        ]
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_a_mark_spelled_out_in_a_text_does_not_end_the_document(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))
    text = "before <|endoftext|> after"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eod]) == text


def test_no_marks_are_added_and_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = train_bpe(["<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.eod == 1
    for ids, text in zip(loaded.encode_batch(TEXTS), TEXTS, strict=True):
        assert len(ids) > 4
        assert loaded.decode(ids.tolist()) == text


def test_sep_ends_a_document_where_there_is_no_eos(bpe_file: Path) -> None:
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(bpe_file), sep_token="<pad>")
    assert of_transformers(loaded, "x").eod == 0


def test_no_end_of_document(tmp_path: Path) -> None:
    train_bpe(["<unk>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"no end-of-document token; it needs an eos_token") as info:
        load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert str(tmp_path) in str(info.value)


def test_digest_follows_the_ids_not_the_place(bpe_file: Path, tmp_path: Path) -> None:
    shutil.copy(bpe_file, tmp_path / "copy.json")
    train_bpe(["<pad>", "<|endoftext|>"], vocab_size=300).save(str(tmp_path / "smaller.json"))
    here = load_tokenizer(str(bpe_file)).digest
    assert load_tokenizer(str(tmp_path / "copy.json")).digest == here
    assert load_tokenizer(str(tmp_path / "smaller.json")).digest != here
    assert ByteTokenizer().digest != here
    other_end = PreTrainedTokenizerFast(tokenizer_file=str(bpe_file), eos_token="<pad>")
    assert of_transformers(other_end, "x").digest != here


def test_an_id_that_no_vocabulary_has(tmp_path: Path) -> None:
    """`tokenizers` would end the process, for want of memory for all ids below it."""
    vocabulary = {"<|endoftext|>": 0, "a": 2_000_000_000}
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}}))
    with pytest.raises(DataError, match="token 'a' has id 2000000000: expected ids below"):
        load_tokenizer(str(file))


def test_using_a_tokenizer_does_not_change_its_digest(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))
    tokenizer.encode_batch(TEXTS)
    assert isinstance(tokenizer, FastTokenizer)
    assert FastTokenizer(tokenizer.backend, "x").digest == tokenizer.digest


def test_a_tokenizer_written_in_python() -> None:
    tokenizer = of_transformers(ByT5Tokenizer(extra_ids=0), "byt5")
    text = "äöü </s> x"
    ids = tokenizer.encode(text).tolist()
    assert ids == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(ids) == text
    assert tokenizer.digest == of_transformers(ByT5Tokenizer(extra_ids=0), "other").digest
    assert tokenizer.digest != of_transformers(ByT5Tokenizer(extra_ids=5), "byt5").digest


def test_code_beside_a_tokenizer_is_never_run(bpe_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "canary"
    folder.mkdir()
    shutil.copy(bpe_file, folder / "tokenizer.json")
    (folder / "canary.py").write_text(
        f"open({str(tmp_path / 'sung')!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class Canary(PreTrainedTokenizerFast): pass\n"
    )
    settings = {
        "tokenizer_class": "Canary",
        "eos_token": "<|endoftext|>",
        "auto_map": {"AutoTokenizer": ["canary.Canary", "canary.Canary"]},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(DataError, match="cannot be loaded"):
        load_tokenizer(str(folder))
    assert not (tmp_path / "sung").exists()


@pytest.mark.parametrize("name", ["./missing", "missing/tokenizer.json", "a b", "/no/such/folder"])
def test_missing_path(name: str) -> None:
    with pytest.raises(DataError, match=r"no such file or folder \(from ") as info:
        load_tokenizer(name)
    assert repr(name) in str(info.value)


@pytest.mark.parametrize("content", ["", "{}", "not json", '{"model": {"type": "BPE"}}'])
def test_damaged_file_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    for source in (path, tmp_path):
        with pytest.raises(DataError, match="cannot be loaded") as info:
            load_tokenizer(str(source))
        assert "\n" not in str(info.value)
        assert str(source) in str(info.value)


TINY = """
def tiny():
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    return {
        "name": "tiny",
        "pat_str": r"\\w+|\\W",
        "mergeable_ranks": ranks,
        "special_tokens": {"<|endoftext|>": 260, "<|other|>": 259},
    }
def endless():
    return {**tiny(), "name": "endless", "special_tokens": {}}
ENCODING_CONSTRUCTORS = {"tiny": tiny, "endless": endless}
"""


@pytest.fixture
def tiktoken_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install encodings that need no network, as tiktoken's plug-ins give them."""
    tiktoken = pytest.importorskip("tiktoken")
    (tmp_path / "tiktoken_ext").mkdir()
    (tmp_path / "tiktoken_ext" / "of_this_test.py").write_text(TINY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODING_CONSTRUCTORS", None)
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    tiktoken.registry._available_plugin_modules.cache_clear()


@pytest.mark.usefixtures("tiktoken_plugin")
def test_tiktoken() -> None:
    tokenizer = load_tokenizer("tiktoken:tiny")
    assert (tokenizer.vocab_size, tokenizer.eod) == (261, 260)
    assert tokenizer.encode("the cat").tolist() == [257, 32, *b"cat"]
    text = "then <|endoftext|> ä"
    (ids,) = tokenizer.encode_batch([text])
    assert tokenizer.eod not in ids
    assert tokenizer.decode([*ids, 260, 259, 258, 999]) == text
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(text).tolist() == ids.tolist()
    assert copy.digest == tokenizer.digest == load_tokenizer("tiktoken:tiny").digest
    with pytest.raises(DataError, match=r"'tiktoken:endless': no end-of-document token <\|endoft"):
        load_tokenizer("tiktoken:endless")
    with pytest.raises(DataError, match=r"'tiktoken:none': cannot be loaded \(Unknown encoding"):
        load_tokenizer("tiktoken:none")


def test_without_tiktoken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(DataError, match="tiktoken is not installed; pip install tiktoken"):
        load_tokenizer("tiktoken:gpt2")


def test_a_copy_for_another_process_gives_the_same(bpe_file: Path) -> None:
    for tokenizer in (load_tokenizer(str(bpe_file)), load_tokenizer("byte")):
        copy = pickle.loads(pickle.dumps(tokenizer))
        text = "before <|endoftext|> after"
        assert copy.encode(text).tolist() == tokenizer.encode(text).tolist()
        assert copy.decode(copy.encode(text).tolist()) == text
        assert (copy.digest, copy.eod) == (tokenizer.digest, tokenizer.eod)


def test_the_same_ids_as_transformers(bpe_file: Path) -> None:
    reference = PreTrainedTokenizerFast(tokenizer_file=str(bpe_file), eos_token="<|endoftext|>")
    tokenizer = of_transformers(reference, "x")
    for text in [*TEXTS, "a <pad> b", "", " \n\t x"]:
        expected = reference(text, add_special_tokens=False, split_special_tokens=True)
        assert tokenizer.encode(text).tolist() == expected["input_ids"]
