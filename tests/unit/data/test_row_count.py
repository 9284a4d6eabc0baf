"""Rows of JSON that lack the field of their text are counted, over the whole corpus, and told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megapipe.cli import parse
from megapipe.data.commands import main as prepare_data
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare import prepare
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.errors import DataError
from megapipe.layout.resolve import resolve
from tests.parity.json_rows import OTHER, ROWS, counted, lines

BYTE = ByteTokenizer()
LINE = "12 of 1,000 rows of rows.jsonl have no field 'text' (data.text_field): they are left out"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_thousand() -> None:
    """The first is not among those that lack it, the last one is."""
    rows = [OTHER if i % 83 == 82 or i == 999 else {"text": f"row {i}"} for i in range(1000)]
    assert rows.count(OTHER) == 13
    rows[82] = {"text": None}
    Path("rows.jsonl").write_bytes(lines(rows))


def test_where_there_are_no_rows_none_is_missed() -> None:
    Path("x.txt").write_text("text")
    Path("x.jsonl").write_bytes(lines(ROWS))
    Path("one.jsonl").write_bytes(lines([{"text": "one text, which is divided"}, OTHER]))
    assert counted("x.txt") == RowCount(0, 0)
    assert counted("one.jsonl") == RowCount(2, 1)
    assert counted("x.jsonl") == RowCount(len(ROWS), 0)


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
