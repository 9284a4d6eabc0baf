"""Rows without a text and characters that are none are counted, over the whole corpus, and told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megapipe.cli import parse
from megapipe.data.commands import main as prepare_data
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare import prepare
from megapipe.data.sources import load_sources
from megapipe.data.tokenizer import ByteTokenizer
from megapipe.errors import DataError
from megapipe.layout.resolve import resolve
from tests.parity.json_rows import EMPTY, OTHER, ROWS, counted, lines

BYTE = ByteTokenizer()
LINES = """\
12 of 1,000 rows of rows.jsonl are skipped: no field 'text' (data.text_field)
2 of 1,000 rows of rows.jsonl are skipped: no text in field 'text' (data.text_field)
3 lone surrogates in rows.jsonl (such as \\ud83d without its other half): each is read as ?
""".splitlines()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_thousand() -> None:
    """Write a thousand rows; the last is among the 13 that lack the text, the first is not."""
    rows = [OTHER if i % 83 == 82 or i == 999 else {"text": f"row {i}"} for i in range(1000)]
    assert rows.count(OTHER) == 13
    rows[82], rows[83] = {"text": None}, {"text": ""}
    rows[84] = {"text": "a whole pair \U0001f600 and three halves \ude00 \ud83d\ud83d"}
    Path("rows.jsonl").write_bytes(lines(rows))


def test_where_there_are_no_rows_none_is_missed() -> None:
    Path("x.txt").write_text("text")
    Path("x.jsonl").write_bytes(lines(ROWS))
    Path("one.jsonl").write_bytes(lines([{"text": "one text, which is divided"}, OTHER]))
    assert counted("x.txt") == RowCount(0, 0)
    assert counted("one.jsonl") == RowCount(2, 1)
    assert counted("x.jsonl") == RowCount(len(ROWS), 0, EMPTY)


def test_tables_have_rows_too() -> None:
    """Parquet and data sets, which have the field in each of their rows."""
    texts = [*"abc", None, "", None, "d"]
    pq.write_table(pa.table({"text": texts}), "x.parquet", row_group_size=2)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk("saved")
    for source in ("x.parquet", "saved"):
        assert counted(source) == RowCount(7, 0, 3), source


def test_halves_of_pairs_in_examples(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "a \ud83d", "completion": "\ude00 \U0001f600"}
    Path("rows.jsonl").write_bytes(lines([row] * 3))
    given = [
        "data.source=rows.jsonl",
        "data.sample_format=supervised",
        "data.validation_fraction=0",
    ]
    load_sources(resolve(parse(given).config, 1, 257)[0], BYTE)
    assert "6 lone surrogates in rows.jsonl" in capsys.readouterr().err


def test_it_is_told_at_each_start_and_changes_no_digest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_thousand()
    config, _ = resolve(parse(["data.source=rows.jsonl", "data.cache=cache"]).config, 1, 257)
    for _ in range(2):  # the second finds the cache
        load_sources(config, BYTE)
        assert capsys.readouterr().err.splitlines() == [f"megapipe: {line}" for line in LINES]
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
    assert capsys.readouterr().out.splitlines()[-3:] == LINES


def test_the_training_of_a_tokenizer_reports_it(capsys: pytest.CaptureFixture[str]) -> None:
    write_thousand()
    given = ["tokenizer", "--source", "rows.jsonl", "--vocab-size", "300", "--output", "made"]
    assert prepare_data(given) == 0
    assert capsys.readouterr().out.splitlines()[1:] == LINES


@pytest.mark.parametrize(
    ("rows", "reasons"),
    [
        ([{"text": None}] * 3, "3 of 3 rows have no text in field 'text'"),
        (
            [{"text": ""}, OTHER, {"text": None}],
            "1 of 3 rows has no field 'text', 2 of 3 rows have no text in field 'text'",
        ),
    ],
)
def test_rows_without_any_text_are_counted(
    rows: list[Any], reasons: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("rows.jsonl").write_bytes(lines(rows))
    Path("rows.json").write_text(json.dumps(rows))
    pq.write_table(pa.table({"text": [row.get("text") for row in rows]}), "rows.parquet")
    for source in ("rows.jsonl", "rows.json"):
        no = f"corpus '{source}' has no text: {reasons} (data.text_field)"
        with pytest.raises(DataError, match=f"^{re.escape(no)}$"):
            counted(source)
        given = ["tokenizer", "--source", source, "--vocab-size", "300", "--output", "made"]
        assert prepare_data(given) == 3
        assert capsys.readouterr().err == f"megapipe: error: {no}\n"
    with pytest.raises(DataError, match="has no text: 3 of 3 rows have no text in field 'text'"):
        counted("rows.parquet")


def test_a_corpus_without_it_is_refused() -> None:
    Path("rows.jsonl").write_bytes(lines([OTHER] * 9))
    with pytest.raises(DataError, match=r"no field 'text' \(data.text_field\); it has: body") as no:
        counted("rows.jsonl")
    assert no.value.exit_code == 3
