"""A corpus in parts: every format, packed or not, wherever the borders fall."""

import gzip
import json
import lzma
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.data import DataConfig
from megapipe.data.corpus import corpus_shards, json_rows, parts, text_chunks, total_bytes
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.text_chunks import TextChunk, cut
from megapipe.errors import DataError
from tests.unit.data.data_cases import TEXTS, drop_privileges


def config(source: Path | str, **given: Any) -> DataConfig:
    return DataConfig(source=str(source), **given)


def by_part(given: DataConfig) -> list[list[str]]:
    """Return the documents of each part."""
    found = []
    for part in parts(given):
        texts, text = [], ""
        for piece in part.pieces(RowCount()):
            text += piece.text
            if piece.ends:
                texts.append(text)
                text = ""
        assert not text, "a part ends with a document"
        found.append(texts)
    return found


def all_texts(given: DataConfig) -> list[str]:
    return [text for texts in by_part(given) for text in texts]


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"n": i, "text": t}).encode() + b"\n" for i, t in enumerate(texts))


PACKERS = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("size", [1, 100, 2**24])
def test_packed_files(
    tmp_path: Path, suffix: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_shards, "PART", size)
    pack = PACKERS[suffix]
    for name, content in (
        ("a.jsonl", lines_of(TEXTS)),
        ("b.json", json.dumps([{"text": text} for text in TEXTS]).encode()),
        ("c.txt", "".join(TEXTS).encode()),
    ):
        (tmp_path / (name + suffix)).write_bytes(pack(content))
    expected = [*TEXTS, *TEXTS, "".join(TEXTS)]
    assert all_texts(config(tmp_path)) == expected
    assert all_texts(config(tmp_path / f"*{suffix}")) == expected
    # two members, as `cat a.gz b.gz` makes
    half = len(TEXTS) // 2
    two = pack(lines_of(TEXTS[:half])) + pack(lines_of(TEXTS[half:]))
    (tmp_path / f"two.ndjson{suffix}").write_bytes(two)
    assert all_texts(config(tmp_path / f"two.ndjson{suffix}")) == TEXTS


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.txt"])
def test_packed_files_cut_short_or_of_another_kind(tmp_path: Path, suffix: str, name: str) -> None:
    texts = [str(random.Random(i).random()) for i in range(3000)]
    path = tmp_path / (name + suffix)
    for content in (PACKERS[suffix](lines_of(texts))[:-200], b"nothing of the kind" * 10):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"x\.\w+\.\w+ cannot be decompressed \(") as info:
            all_texts(config(path))
        assert "\n" not in str(info.value)


@settings(max_examples=60)
@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 200), st.booleans())
def test_lines_belong_to_one_part_each(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], size: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(lines_of(texts)[: None if ends else -1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_shards, "PART", size)
        found = by_part(config(path))
        assert [text for part in found for text in part] == texts
        assert len(found) == -(-path.stat().st_size // size)
        sizes = [part.source_bytes for part in parts(config(path))]
    assert sum(sizes) == path.stat().st_size == total_bytes(config(path))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": nope}', r"\(line 42: Expecting value at character 9\)"),
        (b'{"text": 3}', "field 'text' .* holds a number, not text, in line 42"),
        (b"[1]", "line 42 holds a list, not an object with fields"),
        (b'"x"', "line 42 holds a text, not an object"),
        (b'{"text": "\xff"}', r"cannot be read \(line 42: .*0xff"),
    ],
)
def test_a_wrong_line_is_named_in_whatever_part(
    tmp_path: Path, suffix: str, line: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_shards, "PART", 300)
    content = lines_of(TEXTS[:41]) + line + b"\n" + lines_of(TEXTS)
    path = tmp_path / f"x.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    with pytest.raises(DataError, match=says) as info:
        all_texts(config(path))
    assert str(info.value).startswith(f"corpus file {path}: ")
    assert "\n" not in str(info.value)


def test_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"n": range(60), "text": TEXTS})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=7)
    assert len(by_part(config(tmp_path))) == 1
    monkeypatch.setattr(corpus_shards, "PART", 1)
    found = by_part(config(tmp_path))
    assert [len(texts) for texts in found] == [7] * 8 + [4]
    assert all_texts(config(tmp_path)) == TEXTS
    coded = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    pq.write_table(coded, tmp_path / "x.parquet")
    assert all_texts(config(tmp_path)) == TEXTS
    (tmp_path / "x.parquet.gz").write_bytes(gzip.compress((tmp_path / "x.parquet").read_bytes()))
    with pytest.raises(
        DataError, match=r"x\.parquet\.gz: parquet cannot be read from a compressed"
    ):
        all_texts(config(tmp_path))


def test_text_files_come_several_to_a_part(
    text_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert by_part(config(text_folder)) == [TEXTS]
    monkeypatch.setattr(corpus_shards, "PART", 200)
    found = by_part(config(text_folder))
    assert 5 < len(found) < len(TEXTS)
    assert [text for texts in found for text in texts] == TEXTS


def test_patterns(text_folder: Path) -> None:
    (text_folder / "deep" / "er").mkdir(parents=True)
    (text_folder / "deep" / "er" / "x.txt").write_text("deep")
    assert all_texts(config(text_folder / "00?.txt")) == TEXTS[:10]
    assert all_texts(config(text_folder / "**" / "x.txt")) == ["deep"]
    assert all_texts(config(text_folder / "dee*")) == ["deep"]
    assert sorted(all_texts(config(text_folder / "**"))) == sorted([*TEXTS, "deep"])
    assert sorted(all_texts(config(text_folder / "**" / "*"))) == sorted([*TEXTS, "deep"])
    with pytest.raises(DataError, match=r"no file matches \(from "):
        all_texts(config(text_folder / "*.jsonl"))
    (text_folder / "a[b].txt").write_text("odd name")
    assert all_texts(config(text_folder / "a[b].txt")) == ["odd name"]


def test_a_folder_with_splits(tmp_path: Path) -> None:
    """Splits are known by the names of files, as `datasets` knows those of the hub."""
    for split, texts in (("train", TEXTS[:40]), ("test", TEXTS[40:])):
        (tmp_path / "set").mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts}), tmp_path / "set" / f"{split}-0.parquet")
    cache = str(tmp_path / "cache")
    for split, texts in (("train", TEXTS[:40]), ("test", TEXTS[40:])):
        found = config(tmp_path / "set", dataset_split=split, cache=cache)
        assert all_texts(found) == texts
    with pytest.raises(DataError, match=r"no split 'dev' \(data.dataset_split\); it has: "):
        all_texts(config(tmp_path / "set", dataset_split="dev", cache=cache))
    assert sorted(all_texts(config(tmp_path / "set"))) == sorted(TEXTS)
    saved = datasets.DatasetDict({"dev": datasets.Dataset.from_dict({"text": TEXTS})})
    saved.save_to_disk(str(tmp_path / "saved"))
    assert all_texts(config(tmp_path / "saved", dataset_split="dev", cache=cache)) == TEXTS


@given(
    st.lists(st.dictionaries(st.sampled_from("ab"), st.text(max_size=9)), max_size=5),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.integers(1, 30),
)
def test_values_of_json_in_any_form(
    rows: list[dict[str, str]], indent: int | None, array: bool, size: int
) -> None:
    if array:
        text = json.dumps(rows, indent=indent, ensure_ascii=False)
    else:
        text = "\n".join(json.dumps(row, indent=indent) for row in rows)
    chunks = (text[i : i + size] for i in range(0, len(text), size))
    assert [row for row, _ in json_rows._values(chunks)] == rows


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('[{"text": "a"},\n{"text": nope}]', r"\(line 2: Expecting value\)"),
        ('[{"text": "a"}\n', r"\(line 2: Expecting value\)"),
        ('{"text": "a"} {"te', r"\(line 1: Unterminated string"),
        ('[\n\n{"text": ["a"]}]', "holds a list, not text, in line 3"),
        ("[[" * 100000, "cannot be read"),
    ],
)
def test_wrong_json(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError, match=says):
        all_texts(config(path))


def test_an_error_in_json_is_told_without_reading_on() -> None:
    def endless() -> Any:
        yield '[{"text": nope}, ' + "x" * 100
        raise AssertionError("read on")

    with pytest.raises(ValueError, match="line 1: Expecting value"):
        list(json_rows._values(endless()))


@given(st.text(st.sampled_from("ab \n\t"), max_size=200), st.integers(4, 40), st.integers(1, 50))
def test_pieces_of_a_long_document(text: str, longest: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_chunks, "LONGEST", longest)
        found = list(cut(text[i : i + size] for i in range(0, len(text), size)))
        whole = list(cut([text]))
    assert found == whole, "chunks decide nothing"
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert all(0 < len(piece.text) <= longest for piece in found[:-1])
    for piece, following in pairwise(found):
        if len(piece.text) < longest:
            assert piece.text[-1] == "\n"
            assert not following.text[0].isspace()


def test_a_text_file_longer_than_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_chunks, "LONGEST", 100)
    monkeypatch.setattr(text_chunks, "_READ", 7)  # in the middle of characters
    text = "".join(TEXTS)
    (tmp_path / "x.txt").write_bytes(text.encode())
    (part,) = parts(config(tmp_path / "x.txt"))
    found = list(part.pieces(RowCount()))
    assert len(found) > 10
    assert "".join(piece.text for piece in found) == text
    (tmp_path / "x.txt").write_bytes(text.encode() + b"\xff" + b"more")
    with pytest.raises(DataError, match=rf"byte 0xff at offset {len(text.encode())}\)"):
        all_texts(config(tmp_path / "x.txt"))
    (tmp_path / "x.txt").write_bytes(text.encode() + "€".encode()[:2])
    with pytest.raises(DataError, match=rf"byte 0xe2 at offset {len(text.encode())}\)"):
        all_texts(config(tmp_path / "x.txt"))


def test_rows_are_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_chunks, "LONGEST", 50)
    (tmp_path / "x.jsonl").write_bytes(lines_of(["a" * 120, "b"]))
    (part,) = parts(config(tmp_path))
    assert list(part.pieces(RowCount())) == [
        TextChunk("a" * 50, False),
        TextChunk("a" * 50, False),
        TextChunk("a" * 20, True),
        TextChunk("b", True),
    ]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.txt").write_bytes(mark + b"a\xef\xbb\xbf")
    (tmp_path / "b.json").write_bytes(mark + b'[{"text": "b"}]')
    (tmp_path / "c.jsonl").write_bytes(mark + b'{"text": "c"}\r\n{"text": "d"}\r\n')
    assert all_texts(config(tmp_path)) == ["a\ufeff", "b", "c", "d"]


def test_a_field_may_be_missing_further_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_shards, "PART", 200)
    rest = b'{"meta": 1}\n' * 200
    for suffix, pack in (("", bytes), (".gz", gzip.compress)):
        path = tmp_path / f"x.jsonl{suffix}"
        path.write_bytes(pack(lines_of(TEXTS) + rest))
        assert all_texts(config(path)) == TEXTS
        path.write_bytes(pack(rest + lines_of(TEXTS)))
        with pytest.raises(DataError, match=r"no field 'text' \(data.text_field\); it has: meta"):
            all_texts(config(path))


@pytest.mark.full
def test_a_line_longer_than_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_shards, "PART", 1000)
    texts = ["a", "b" * 3_000_000, "c"]
    (tmp_path / "x.jsonl").write_bytes(lines_of(texts))
    assert all_texts(config(tmp_path)) == texts


def test_links_to_nothing_and_folders_that_may_not_be_read(
    open_folder: Path,
) -> None:
    (open_folder / "a.txt").write_text("a")
    (open_folder / "b.txt").symlink_to(open_folder / "none")
    (open_folder / "c").mkdir()
    (open_folder / "c" / "c.txt").write_text("c")
    for source in (open_folder / "*.txt", open_folder):
        assert all_texts(config(source))[0] == "a"
    (open_folder / "c").chmod(0o644)
    drop_privileges()
    with pytest.raises(DataError, match=r"c\.txt.*: Permission denied"):
        all_texts(config(open_folder / "c"))


def test_a_single_saved_split(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"text": TEXTS}, split="dev")
    saved.save_to_disk(str(tmp_path / "saved"))
    for split in (None, "dev"):
        assert all_texts(config(tmp_path / "saved", dataset_split=split)) == TEXTS
    with pytest.raises(DataError, match=r"no split 'test' .*; it has: dev"):
        all_texts(config(tmp_path / "saved", dataset_split="test"))


def test_a_file_that_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines_of(TEXTS))
    (part,) = parts(config(path))
    os.unlink(path)
    with pytest.raises(DataError, match=r"x\.jsonl: No such file"):
        list(part.pieces(RowCount()))
