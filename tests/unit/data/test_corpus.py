import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megapipe.config.data import DataConfig
from megapipe.data.corpus import identity, pieces
from megapipe.data.corpus import tables as tables_module
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.errors import DataError
from tests.unit.data.data_cases import TEXTS, drop_privileges, rows, write_jsonl


def read(source: Path | str, **settings: Any) -> list[str]:
    folder = source if isinstance(source, Path) else Path(source)
    cache = str(folder.parent / "cache") if folder.is_absolute() else "cache"
    return whole(DataConfig(source=str(source), cache=cache, **settings))


def whole(config: DataConfig) -> list[str]:
    """Return the documents of a corpus."""
    texts, text = [], ""
    for piece in pieces(config):
        text += piece.text
        if piece.ends:
            texts.append(text)
            text = ""
    return [text for text in texts if text]


def refused(source: Path | str, match: str, **settings: Any) -> None:
    with pytest.raises(DataError, match=match) as info:
        read(source, **settings)
    assert "\n" not in str(info.value)
    assert str(source) in str(info.value)


def table(texts: list[str | None], field: str = "text", kind: Any = None) -> pa.Table:
    return pa.table({"number": range(len(texts)), field: pa.array(texts, kind or pa.string())})


def test_stdlib_is_what_the_interpreter_brings() -> None:
    config = DataConfig(source="stdlib")
    texts = whole(config)
    root = Path(sysconfig.get_path("stdlib"))
    assert (root / "argparse.py").read_text() in texts
    assert (root / "json" / "decoder.py").read_text() in texts
    assert sum(len(text) for text in texts) > 5e6
    assert all(texts)
    assert texts == whole(config)
    names = [name for name, _ in identity(config)[-1]]
    assert names == sorted(names, key=lambda name: Path(name).parts)
    assert not [name for name in names if "site-packages" in name or not name.endswith(".py")]


def test_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_bytes("line\r\n\nline äöü".encode())
    assert read(path) == ["line\r\n\nline äöü"]


def test_jsonl(tmp_path: Path) -> None:
    assert read(write_jsonl(tmp_path / "x.jsonl", rows())) == TEXTS
    assert read(write_jsonl(tmp_path / "y.jsonl", rows(field="b")), text_field="b") == TEXTS


def test_many_rows_of_json(tmp_path: Path) -> None:
    texts = [f"{i} " + "x" * (i % 5000) for i in range(6000)]  # above a reader's 10 MB
    assert read(write_jsonl(tmp_path / "x.jsonl", rows(texts))) == texts


def test_jsonl_of_uneven_rows(tmp_path: Path) -> None:
    uneven = [{"text": "a", "m": 1}, {"m": "s", "text": "b"}, {"x": [1], "text": None}, {"x": []}]
    assert read(write_jsonl(tmp_path / "x.jsonl", uneven)) == ["a", "b"]


def test_json_array(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(rows(), indent=1))
    assert read(path) == TEXTS


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_parquet(tmp_path: Path, kind: Any) -> None:
    pq.write_table(table(TEXTS, kind=kind), tmp_path / "x.parquet", row_group_size=7)
    assert read(tmp_path / "x.parquet") == TEXTS


def test_folder_in_the_order_of_names(text_folder: Path) -> None:
    assert read(text_folder) == TEXTS
    (text_folder / "sub").mkdir()
    write_jsonl(text_folder / "sub" / "b.jsonl", rows(["j1", "j2"]))
    pq.write_table(table(["p1", None, "", "p2"]), text_folder / "sub" / "a.parquet")
    (text_folder / "sub" / "c.jsonl").touch()
    pq.write_table(table([]), text_folder / "sub" / "d.parquet")
    (text_folder / "README.md").write_text("not part of the corpus")
    (text_folder / ".hidden.txt").write_text("not part of the corpus")
    assert read(text_folder) == [*TEXTS, "p1", "p2", "j1", "j2"]


def test_folder_of_other_files_is_read_as_text(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "b.py").write_text("b = 1\n")
    (folder / "a.c").write_text("int a;\n")
    assert read(folder) == ["int a;\n", "b = 1\n"]


def test_saved_by_datasets(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"text": TEXTS})
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(str(tmp_path / "dict"))
    datasets.DatasetDict({"test": saved}).save_to_disk(str(tmp_path / "rest"))
    assert read(tmp_path / "one") == TEXTS
    assert read(tmp_path / "dict") == TEXTS
    refused(tmp_path / "rest", r"no split 'train' \(data.dataset_split\); it has: test")
    refused(tmp_path / "one", "no field 'content'.* it has: text$", text_field="content")


def test_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub's answer goes through, with the two calls that need a network replaced."""
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, **settings: Any) -> Any:
        asked.append((name, subset, settings["streaming"]))
        split = datasets.Dataset.from_dict({"content": TEXTS}).to_iterable_dataset()
        return {"train": split, "test": split.take(2)}

    monkeypatch.setattr(tables_module, "check_reachable", lambda *args: asked.append(args))
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("owner/name", subset="en", text_field="content") == TEXTS
    assert asked == [("corpus", "owner/name", "dataset"), ("owner/name", "en", True)]
    assert read("owner/name", text_field="content", dataset_split="test") == TEXTS[:2]
    refused("owner/name", "no field 'text'.* it has: content$")
    refused("owner/name", "no split 'dev'.* it has: train, test$", dataset_split="dev")


def test_keys_of_data_sets_beside_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing asks the hub, and no key is passed over."""

    def no_hub(*given: Any, **settings: Any) -> Any:
        raise AssertionError("the hub is asked")

    monkeypatch.setattr(tables_module, "check_reachable", no_hub)
    monkeypatch.setattr(datasets, "load_dataset", no_hub)
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder/a.jsonl", rows())
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    for source in ("folder/a.jsonl", "folder/*.jsonl", "f*"):
        if source != "f*":
            assert read(tmp_path / source) == TEXTS
            words = "data.dataset_split=train is for a data set or its folder"
            refused(tmp_path / source, words, dataset_split="train")
        refused(tmp_path / source, "data.subset=en is for a data set on the hub", subset="en")
    refused(tmp_path / "saved", "data.subset=en", subset="en", dataset_split="train")
    refused("stdlib", "data.dataset_split=train is for a data set", dataset_split="train")
    refused("stdlib", "data.subset=en is for a data set", subset="en")


@pytest.mark.parametrize(
    "source", ["/no/such/corpus", "./corpora/x", "x.jsonl", "corpora/x.TXT", "a/b/c", "two words"]
)
def test_missing(source: str) -> None:
    refused(source, r"no such file or folder \(from /")
    with pytest.raises(DataError, match="no such file or folder"):
        identity(DataConfig(source=source))


def is_empty(source: Path, words: str = "is empty: there is no text in it") -> None:
    cache = source.parent / "cache"
    with pytest.raises(DataError, match=words):
        prepare(DataConfig(source=str(source), cache=str(cache)), ByteTokenizer())
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [("x.txt", ""), ("x", ""), ("x.jsonl", ""), ("x.json", ""), ("x.jsonl", "\n"), ("x.json", " ")],
)
def test_empty_file(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    is_empty(tmp_path / name)


def test_empty_corpora(tmp_path: Path) -> None:
    pq.write_table(table([]), tmp_path / "none.parquet")
    pq.write_table(table(["", None]), tmp_path / "blank.parquet")
    pq.write_table(table([None, None], kind=pa.null()), tmp_path / "null.parquet")
    (tmp_path / "folder").mkdir()
    for name in ("none.parquet", "folder"):
        is_empty(tmp_path / name)
    for name in ("blank.parquet", "null.parquet"):
        is_empty(tmp_path / name, "has no text: 2 of 2 rows have no text in field 'text'")
    datasets.Dataset.from_dict({"text": []}).save_to_disk(str(tmp_path / "saved"))
    is_empty(tmp_path / "saved", "is empty|cannot be read ")  # by later versions of `datasets`


def test_no_such_field(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "x.jsonl", rows(field="content"))
    pq.write_table(table(TEXTS, "content"), tmp_path / "x.parquet")
    for name in ("x.jsonl", "x.parquet"):
        refused(tmp_path / name, r"no field 'text' \(data.text_field\); it has: number, content$")


@pytest.mark.parametrize("values", [[1, 2], [{"a": 1}], [["a"]], [1, "mixed"]])
def test_field_that_is_no_text(tmp_path: Path, values: list[Any]) -> None:
    write_jsonl(tmp_path / "x.jsonl", [{"text": value} for value in values])
    refused(tmp_path / "x.jsonl", r"field 'text' \(data.text_field\) holds .*, not text")


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("x.txt", b"abc\xff\xfe", r"not UTF-8 text \(byte 0xff at offset 3\)"),
        ("x.bin", b"\x80", r"not UTF-8 text \(byte 0x80 at offset 0\)"),
        ("x.jsonl", b'{"text": "abc\xff"}\n', "cannot be read .*0xff"),
        (
            "x.jsonl",
            b'{"text": "a"}\n{"text": nope}\n',
            r"\(line 2: Expecting value at",
        ),
        ("x.json", b"[{", "cannot be read "),
        ("x.parquet", b"nothing of the kind", "cannot be read .*Parquet"),
        ("x.parquet", b"", "cannot be read "),
    ],
)
def test_undecodable(tmp_path: Path, name: str, content: bytes, match: str) -> None:
    (tmp_path / name).write_bytes(content)
    refused(tmp_path / name, match)


def test_cut_parquet(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(table(TEXTS), path)
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(0).column(1).dictionary_page_offset
    content[start : start + 40] = bytes(40)
    path.write_bytes(content)
    refused(path, "cannot be read ")


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.json", "x.parquet"])
def test_unreadable_file(open_folder: Path, name: str) -> None:
    (open_folder / name).write_text("{}")
    (open_folder / name).chmod(0)
    drop_privileges()
    refused(open_folder / name, "Permission denied")


def test_unreadable_folder(open_folder: Path) -> None:
    inner = open_folder / "inner"
    inner.mkdir(mode=0)
    drop_privileges()
    refused(inner, "Permission denied")
    refused(inner / "x.txt", "Permission denied")


def test_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "neither a regular file nor a folder")


def test_identity_follows_the_files(text_folder: Path) -> None:
    config = DataConfig(source=str(text_folder))
    seen = [identity(config)]
    file = text_folder / "000.txt"
    text = file.read_text()
    file.write_text(text.swapcase())
    os.utime(file, ns=(1, 1))
    seen.append(identity(config))
    file.write_text(text + "x")
    os.utime(file, ns=(1, 1))
    seen.append(identity(config))
    file.rename(text_folder / "0000.txt")
    seen.append(identity(config))
    file.touch()
    seen.append(identity(config))
    seen.append(identity(config.model_copy(update={"text_field": "b"})))
    assert all(seen[i] != seen[j] for i in range(len(seen)) for j in range(i))
    assert identity(config) == identity(config)
    json.dumps(seen)
