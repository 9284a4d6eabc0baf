"""Sources by URL: copied once, checked, and read as if they were local."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megapipe.config.data import DataConfig
from megapipe.data import remote
from megapipe.data.prepare.remote_cache import MANIFEST, check_contents
from megapipe.data.remote import fetched, is_remote
from megapipe.data.stored import crc_of
from megapipe.data.token_file_corpus import given_tokens
from megapipe.data.tokens import TokenWriter
from megapipe.data.tokens.format import bin_of, idx_of, token_type
from megapipe.errors import DataError
from megapipe.util import retries
from tests.parity.bucket import TEXTS, filled


@pytest.fixture
def store() -> Iterator[Any]:
    with filled() as system:
        yield system


def fetch(cache: Path, source: str) -> str:
    return fetched(DataConfig(source=source, cache=str(cache)), progress=False).source


def files(path: str) -> dict[str, bytes]:
    """Read the files in a folder, or those that match `**/*` in it."""
    folder = Path(path.removesuffix("/**/*"))
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_file_a_folder_and_a_pattern(tmp_path: Path, store: Any) -> None:
    one = fetch(tmp_path, "memory://bucket/b.txt")
    assert (Path(one).name, Path(one).read_bytes()) == ("b.txt", b"b")
    folder = files(fetch(tmp_path, "memory://bucket/a"))
    assert folder == {name[2:]: content for name, content in TEXTS.items() if name[0] == "a"}
    pattern = fetch(tmp_path, "memory://bucket/**/*.txt")
    assert pattern.endswith("**/*")
    assert files(pattern) == {n: c for n, c in TEXTS.items() if n.endswith(".txt")}
    assert len(list(tmp_path.iterdir())) == 3
    manifest = json.loads((Path(one).parents[1] / MANIFEST).read_text())
    assert manifest["files"]["b.txt"]["sha256"] == hashlib.sha256(b"b").hexdigest()


def test_it_is_copied_once_and_anew_when_it_has_changed(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = fetch(tmp_path, "memory://bucket/a")
    with monkeypatch.context() as patch:
        patch.setattr(remote, "_copy", None)
        assert fetch(tmp_path, "memory://bucket/a") == first
    store.pipe("/bucket/a/1.txt", b"ONE")
    second = fetch(tmp_path, "memory://bucket/a")
    assert second != first
    assert files(second)["1.txt"] == b"ONE"


def test_a_damaged_copy_is_found(tmp_path: Path, store: Any) -> None:
    one = Path(fetch(tmp_path, "memory://bucket/b.txt"))
    one.write_bytes(b"bb")
    with pytest.raises(
        DataError, match=r"b\.txt has 2 bytes, not 1: remove .* and it is downloaded"
    ):
        fetch(tmp_path, "memory://bucket/b.txt")
    one.unlink()
    with pytest.raises(DataError, match=r"b\.txt: No such file or directory: remove"):
        fetch(tmp_path, "memory://bucket/b.txt")
    (one.parents[1] / MANIFEST).write_text("{}")
    with pytest.raises(DataError, match=r"manifest\.json is damaged: remove"):
        fetch(tmp_path, "memory://bucket/b.txt")


def test_a_token_file_that_is_damaged_at_the_same_size_is_found_when_it_is_read(
    tmp_path: Path, store: Any
) -> None:
    with TokenWriter(tmp_path / "x", token_type(257), 257) as writer:
        writer.add(np.arange(100))
    for suffix in ("bin", "idx"):
        store.pipe(f"/bucket/x.{suffix}", (tmp_path / f"x.{suffix}").read_bytes())
    config = fetched(DataConfig(source="memory://bucket/x", cache=str(tmp_path)), progress=False)
    given_tokens(config)
    prefix = Path(config.source)
    for path, size in ((bin_of(prefix), 200), (idx_of(prefix), 62)):
        sound = path.read_bytes()
        path.write_bytes(sound[:40] + bytes([sound[40] ^ 1]) + sound[41:])
        with pytest.raises(DataError, match=rf"{path.name} is damaged: bytes 0 to {size} do not"):
            given_tokens(config)
        path.write_bytes(sound)
    given_tokens(config)
    crc_of(bin_of(prefix)).unlink()
    with pytest.raises(DataError, match=r"x\.crc: No such file or directory: remove"):
        fetched(DataConfig(source="memory://bucket/x", cache=str(tmp_path)))


def test_what_is_cut_short_is_not_kept(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = type(store).info
    monkeypatch.setattr(type(store), "info", lambda self, path: {**info(self, path), "size": 99})
    monkeypatch.setattr(retries, "WAITS_S", (retries.LIMIT_S,))
    with pytest.raises(DataError, match=r"cannot read /bucket/b.txt: 1 bytes arrived, of 99$"):
        fetch(tmp_path, "memory://bucket/b.txt")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_complete_are_kept(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_, fails = type(store).open, "deep"

    def counted(self: Any, path: str, *given: Any, **options: Any) -> Any:
        opened.append(Path(path).name)
        if fails in path:
            raise OSError("the network is down")
        return open_(self, path, *given, **options)

    monkeypatch.setattr(type(store), "open", counted)
    monkeypatch.setattr(retries, "WAITS_S", (retries.LIMIT_S,))
    with pytest.raises(DataError, match=r"cannot read /bucket/a/deep/3\.txt: the network is down"):
        fetch(tmp_path, "memory://bucket/a")
    fails = "no file"
    copy = fetch(tmp_path, "memory://bucket/a")
    assert opened == ["1.txt", "2.jsonl", "3.txt", "3.txt"]
    assert files(copy) == {name[2:]: content for name, content in TEXTS.items() if name[0] == "a"}
    assert [path.name for path in tmp_path.iterdir()] == [Path(copy).parent.name]
    check_contents(copy)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("memory://bucket/none.txt", "no such file or folder, and no file matches"),
        ("memory://bucket/*.parquet", "no such file or folder, and no file matches"),
        ("nowhere://bucket/x", "Protocol not known: nowhere"),
        ("s3://bucket/x", "Install s3fs to access S3"),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
    tmp_path: Path, store: Any, source: str, words: str
) -> None:
    with pytest.raises(DataError) as caught:
        fetch(tmp_path, source)
    assert str(caught.value).startswith(f"data.source={source}: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_and_names_are_no_urls(tmp_path: Path) -> None:
    for source in ("stdlib", "a/b.txt", "owner/name", "module:name", str(tmp_path)):
        assert not is_remote(source)
        config = DataConfig(source=source)
        assert fetched(config) is config
