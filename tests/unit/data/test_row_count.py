"""Rows of JSON that lack the field of their text are counted, over the whole corpus, and told."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megapipe.cli import parse
from megapipe.data.commands import main as prepare_data
from megapipe.data.corpus import dividing
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare import prepare
from megapipe.data.prepare.parts_folder import PartsFolder
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.data_config import DataConfig
from megapipe.errors import DataError
from megapipe.layout.resolve import resolve
from tests.unit.data.data_cases import TEXTS

BYTE = ByteTokenizer()
ROWS = [{"text": text} for text in TEXTS] + [{"text": None}]
OTHER = {"body": "another"}
LINE = "12 of 1,000 rows of rows.jsonl have no field 'text' (data.text_field): they are left out"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_thousand() -> None:
    """The first is not among those that lack it, the last one is."""
    rows = [OTHER if i % 83 == 82 or i == 999 else {"text": f"row {i}"} for i in range(1000)]
    assert rows.count(OTHER) == 13
    rows[82] = {"text": None}
    Path("rows.jsonl").write_bytes(lines(rows))


def counted(source: str, **given: Any) -> RowCount | None:
    return prepare(DataConfig(source=source, **given), BYTE, progress=False).meta.rows


@pytest.mark.parametrize("part", [200, 2**23])
def test_of_every_kind_of_file(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part and in many, which several processes read; a text that is null is no mistake."""
    monkeypatch.setattr(dividing, "PART", part)
    rows = [*ROWS[:20], OTHER, *ROWS[20:], *[OTHER] * 40]
    for name, content in {
        "x.jsonl": lines(rows),
        "x.jsonl.gz": gzip.compress(lines(rows)),
        "x.json": json.dumps(rows).encode(),
        "y.json": lines(rows),
    }.items():
        Path(name).write_bytes(content)
        assert counted(name, workers=2) == RowCount(102, 41), name
    Path("folder").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        Path("folder", name).write_bytes(lines(rows))
    Path("folder/c.txt").write_text("text")
    assert counted("folder") == RowCount(204, 82)


def test_where_there_are_no_rows_none_is_missed() -> None:
    Path("x.txt").write_text("text")
    Path("x.jsonl").write_bytes(lines(ROWS))
    Path("one.jsonl").write_bytes(lines([{"text": "one text, which is divided"}, OTHER]))
    assert counted("x.txt") == RowCount(0, 0)
    assert counted("one.jsonl") == RowCount(2, 1)
    assert counted("x.jsonl") == RowCount(len(ROWS), 0)


def test_work_that_is_gone_on_with_counts_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is there is not read again."""
    monkeypatch.setattr(dividing, "PART", 200)
    good = lines([*ROWS, OTHER] * 3)
    path = Path("x.jsonl")
    path.write_bytes(good + b"{")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with pytest.raises(DataError, match="cannot be read"):
        counted("x.jsonl", workers=1, cache="cache")
    done = {file: file.stat().st_mtime_ns for file in Path().rglob("*.npz")}
    assert len(done) > 3
    path.write_bytes(good + b" ")
    os.utime(path, ns=times)
    monkeypatch.setattr(PartsFolder, "remove", lambda self: None)
    assert counted("x.jsonl", cache="cache") == RowCount(3 * len(ROWS) + 3, 3)
    assert all(file.stat().st_mtime_ns == time for file, time in done.items())


def test_it_is_told_at_each_start_and_changes_no_digest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_thousand()
    config, _ = resolve(parse(["data.source=rows.jsonl", "data.cache=cache"]).config, 1, 257)
    for _ in range(2):  # the second finds the cache
        load_sources(config, BYTE)
        assert capsys.readouterr().err.splitlines() == [f"megapipe: {LINE}"]
    load_sources(config, BYTE, progress=False)
    assert capsys.readouterr().err == ""
    (made,) = Path("cache").glob("*/meta.json")
    before = prepare(config.data, BYTE).content
    older = json.loads(made.read_text())
    del older["rows"]
    made.write_text(json.dumps(older))
    assert prepare(config.data, BYTE).content == before, "a checkpoint would be of another corpus"
    load_sources(config, BYTE)
    assert capsys.readouterr().err == "", "an older cache does not know"


@pytest.mark.parametrize("given", [["--cache", "cache"], ["--output", "out"]])
def test_the_command_reports_it(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    write_thousand()
    assert prepare_data(["--source", "rows.jsonl", *given]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == LINE


def test_a_corpus_without_it_is_refused() -> None:
    Path("rows.jsonl").write_bytes(lines([OTHER] * 9))
    with pytest.raises(DataError, match=r"no field 'text' \(data.text_field\); it has: body") as no:
        counted("rows.jsonl")
    assert no.value.exit_code == 3
