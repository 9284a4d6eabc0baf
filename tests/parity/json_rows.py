"""Rows of JSON, some of which lack the text field."""

from __future__ import annotations

import json
from typing import Any

from megapipe.config.data import DataConfig
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.prepare import prepare
from megapipe.data.tokenizer import ByteTokenizer
from tests.unit.data.data_cases import TEXTS

ROWS = [{"text": text} for text in TEXTS] + [{"text": None}]
EMPTY = sum(not row["text"] for row in ROWS)
OTHER = {"body": "another"}


def lines(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def counted(source: str, **given: Any) -> RowCount:
    return prepare(DataConfig(source=source, **given), ByteTokenizer(), progress=False).meta.rows
