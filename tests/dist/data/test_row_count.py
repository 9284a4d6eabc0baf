"""Rows without the field of their text, counted by several processes."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from megapipe.data.corpus import corpus_shards
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare.parts_folder import CorpusShardFolder
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.errors import DataError
from tests.parity.json_rows import EMPTY, OTHER, ROWS, counted, lines

BYTE = ByteTokenizer()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("part", [200, 2**23])
def test_of_every_kind_of_file(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part and in many, which several processes read; a text that is null is no mistake."""
    monkeypatch.setattr(corpus_shards, "PART", part)
    rows = [*ROWS[:20], OTHER, *ROWS[20:], *[OTHER] * 40]
    for name, content in {
        "x.jsonl": lines(rows),
        "x.jsonl.gz": gzip.compress(lines(rows)),
        "x.json": json.dumps(rows).encode(),
        "y.json": lines(rows),
    }.items():
        Path(name).write_bytes(content)
        assert counted(name, tokenizer_workers=2) == RowCount(102, 41, EMPTY), name
    Path("folder").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        Path("folder", name).write_bytes(lines(rows))
    Path("folder/c.txt").write_text("text")
    assert counted("folder") == RowCount(204, 82, 2 * EMPTY)


def test_work_that_is_gone_on_with_counts_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is there is not read again."""
    monkeypatch.setattr(corpus_shards, "PART", 200)
    good = lines([*ROWS, OTHER] * 3)
    path = Path("x.jsonl")
    path.write_bytes(good + b"{")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with pytest.raises(DataError, match="cannot be read"):
        counted("x.jsonl", tokenizer_workers=1, cache="cache")
    done = {file: file.stat().st_mtime_ns for file in Path().rglob("*.npz")}
    assert len(done) > 3
    path.write_bytes(good + b" ")
    os.utime(path, ns=times)
    monkeypatch.setattr(CorpusShardFolder, "remove", lambda self: None)
    assert counted("x.jsonl", cache="cache") == RowCount(3 * len(ROWS) + 3, 3, 3 * EMPTY)
    assert all(file.stat().st_mtime_ns == time for file, time in done.items())
