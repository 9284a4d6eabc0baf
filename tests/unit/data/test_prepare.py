import math
import os
import re
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.data import DataConfig
from megapipe.data.prepare import Prepared, prepare
from megapipe.data.prepare import encode as module
from megapipe.data.prepare.held_out import HeldOut
from megapipe.data.tokenizer import ByteTokenizer, TokenIds, load_tokenizer
from megapipe.data.tokens import TokenFile
from megapipe.errors import DataError
from tests.parity.prepared import Barred, texts_of
from tests.unit.data.data_cases import TEXTS

BYTE = ByteTokenizer()


def single(tmp_path: Path, text: str, fraction: float) -> Prepared:
    path = tmp_path / "one.txt"
    path.write_text(text)
    cache = str(tmp_path / "cache")
    config = DataConfig(source=str(path), cache=cache, validation_fraction=fraction)
    return prepare(config, BYTE)


def test_every_document_is_on_one_side_in_order(folder_config: DataConfig) -> None:
    prepared = prepare(folder_config.model_copy(update={"validation_fraction": 0.2}), BYTE)
    train, validation = texts_of(prepared, "train"), texts_of(prepared, "validation")
    assert sorted(train + validation) == sorted(TEXTS)
    assert train == [text for text in TEXTS if text in train]
    assert validation == [text for text in TEXTS if text in validation]
    assert 4 <= len(validation) <= 24


def test_accounting(folder_config: DataConfig) -> None:
    prepared = prepare(folder_config, BYTE)
    assert re.fullmatch("[0-9a-f]{64}", prepared.digest)  # goes into checkpoint manifests
    assert prepared.folder == Path(folder_config.cache, prepared.digest)
    meta = prepared.meta
    for split, sizes in (("train", meta.train), ("validation", meta.validation)):
        texts = texts_of(prepared, split)
        file = TokenFile(prepared.folder / split)
        assert sizes.documents == len(texts) == len(file.documents) - 1
        assert sizes.text_bytes == sum(len(text.encode()) for text in texts)
        assert sizes.tokens == len(file.tokens) == sizes.text_bytes + sizes.documents
    assert meta.train.documents + meta.validation.documents == len(TEXTS)
    assert (meta.source, meta.tokenizer) == (folder_config.source, "byte")
    assert (meta.vocab_size, meta.eod, meta.tokenizer_digest) == (257, 256, BYTE.digest)
    assert meta.files == {
        path.name: path.stat().st_size
        for path in prepared.folder.iterdir()
        if path.name != "meta.json"
    }


def test_entropy(folder_config: DataConfig) -> None:
    counts = Counter(byte for text in TEXTS for byte in [*text.encode(), 256])
    total = sum(counts.values())
    expected = -sum(count / total * math.log(count / total) for count in counts.values())
    assert prepare(folder_config, BYTE).meta.entropy == pytest.approx(expected, rel=1e-12)


def test_batches_of_texts_do_not_change_the_result(
    folder_config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = prepare(folder_config, BYTE)
    monkeypatch.setattr(module, "BATCH", 50)
    other = folder_config.model_copy(update={"cache": str(tmp_path / "other")})
    many = prepare(other, BYTE)
    assert one.digest == many.digest
    for path in one.folder.iterdir():
        assert path.read_bytes() == (many.folder / path.name).read_bytes()


def test_trained_tokenizer(folder_config: DataConfig, bpe_file: Path) -> None:
    tokenizer = load_tokenizer(str(bpe_file))
    prepared = prepare(folder_config, tokenizer)
    tokens = TokenFile(prepared.folder / "train").tokens[:].tolist()
    train = texts_of(prepare(folder_config, BYTE), "train")
    expected = [i for text in train for i in [*tokenizer.encode(text).tolist(), tokenizer.eod]]
    assert tokens == expected
    assert prepared.meta.train.text_bytes == sum(len(text.encode()) for text in train)


def test_a_share_close_to_the_fraction_is_held_out() -> None:
    for fraction in (0.01, 0.02, 0.3, 0.9):
        held = int(HeldOut(fraction, 20000)(0, 20000).sum())
        assert abs(held - 20000 * fraction) < 5 * (20000 * fraction * (1 - fraction)) ** 0.5


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
@pytest.mark.parametrize("number", [2, 3, 10])
def test_both_sides_have_a_document(tmp_path: Path, fraction: float, number: int) -> None:
    folder = tmp_path / "few"
    folder.mkdir()
    for i in range(number):
        (folder / f"{i}.txt").write_text(f"text {i}")
    cache = str(tmp_path / "cache")
    meta = prepare(
        DataConfig(source=str(folder), cache=cache, validation_fraction=fraction), BYTE
    ).meta
    small = 1 if fraction < 0.5 else number - 1
    assert (meta.train.documents, meta.validation.documents) == (number - small, small)


@pytest.mark.parametrize(
    ("text", "fraction", "cut"),
    [("x" * 90 + "äöüß" + "y" * 6, 0.1, 90), ("ab", 0.02, 1), ("ab", 0.98, 1), ("abc", 0.9, 1)],
)
def test_a_single_document_is_divided(tmp_path: Path, text: str, fraction: float, cut: int) -> None:
    prepared = single(tmp_path, text, fraction)
    assert texts_of(prepared, "train") == [text[:cut]]
    assert texts_of(prepared, "validation") == [text[cut:]]


def test_a_single_character_cannot_be_divided(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"one\.txt' has a single character"):
        single(tmp_path, "x", 0.5)
    assert not list((tmp_path / "cache").iterdir())


def test_a_present_cache_is_used(folder_config: DataConfig) -> None:
    first = prepare(folder_config, BYTE)
    assert prepare(folder_config, Barred()) == first
    masked = folder_config.model_copy(update={"eod_mask_loss": True})
    assert prepare(masked, Barred()) == first  # a matter of the loss, not of the tokens


def test_what_changes_the_content_changes_the_folder(
    folder_config: DataConfig, bpe_file: Path
) -> None:
    seen = {prepare(folder_config, BYTE).digest}
    seen.add(prepare(folder_config, load_tokenizer(str(bpe_file))).digest)
    seen.add(prepare(folder_config.model_copy(update={"validation_fraction": 0.5}), BYTE).digest)
    (Path(folder_config.source) / "060.txt").write_text("one more")
    changed = prepare(folder_config, BYTE)
    seen.add(changed.digest)
    assert len(seen) == 4
    assert "one more" in texts_of(changed, "train") + texts_of(changed, "validation")


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "validation.bin", "validation.idx"])
def test_damaged_cache(folder_config: DataConfig, name: str) -> None:
    prepared = prepare(folder_config, BYTE)
    path = prepared.folder / name
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(DataError, match=rf"{name} has \d+ bytes, not \d+: remove .* is reb"):
        prepare(folder_config, BYTE)
    path.unlink()
    with pytest.raises(DataError, match=rf"{name}: No such file or directory: remove "):
        prepare(folder_config, BYTE)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"train": 3}'])
def test_damaged_meta(folder_config: DataConfig, content: str) -> None:
    prepared = prepare(folder_config, BYTE)
    (prepared.folder / "meta.json").write_text(content)
    with pytest.raises(DataError, match=r"meta\.json is damaged: remove ") as info:
        prepare(folder_config, BYTE)
    assert "\n" not in str(info.value)


def test_an_error_leaves_nothing(folder_config: DataConfig) -> None:
    class Interrupted(ByteTokenizer):
        def encode_batch(self, texts: Any) -> list[TokenIds]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(folder_config, Interrupted())
    assert list(Path(folder_config.cache).iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(folder_config: DataConfig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(DataError, match=r"cache .* \(data\.cache\): File too large"):
            prepare(folder_config, BYTE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(Path(folder_config.cache).iterdir()) == []


def test_cache_that_is_no_folder(folder_config: DataConfig) -> None:
    Path(folder_config.cache).write_text("")
    with pytest.raises(DataError, match=r"cache .*/cache.* \(data\.cache\): "):
        prepare(folder_config, BYTE)
