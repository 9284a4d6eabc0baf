"""Extraction of texts from the rows of a corpus: JSON, tables, data sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megapipe.data.corpus.json_rows import Field, RowReader
from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.text_chunks import TextChunk, cut
from megapipe.errors import DataError


class RowParser(Protocol):
    """Turns the rows of a corpus into documents; may be sent to another process."""

    @property
    def takes_texts(self) -> bool:
        """Whether a text file, which has no rows, is read as one document."""

    def reader(self, origin: str, count: RowCount) -> RowReader:
        """Return a reader of a JSON file's rows. `origin` describes the file in errors. The reader
        adds to `count` all rows, and the rows without a document."""

    def columns(self, origin: str, schema: Any) -> list[str]:
        """Return the columns that the parser needs of a table with this ``pyarrow.Schema``. Raises
        DataError if columns are missing or have another type."""

    def of_table(self, origin: str, table: Any, first: int, count: RowCount) -> Iterator[str]:
        """Yield the documents of a table with the columns that :meth:`columns` returns, and count
        its rows in `count`. `first`: number of the table's first row, for errors."""

    def pieces(self, document: str) -> Iterator[TextChunk]:
        """Yield a document in the text chunks that are tokenized."""


@dataclass(frozen=True)
class TextRows:
    """Parser that takes the text in one field of each row."""

    field: str
    """Name of the field, ``data.text_field``."""
    takes_texts = True

    def reader(self, origin: str, count: RowCount) -> RowReader:
        return Field(self.field, origin, count)

    def columns(self, origin: str, schema: Any) -> list[str]:
        if self.field not in schema.names:
            raise DataError(
                f"{origin}: no field {self.field!r} (data.text_field); it has: "
                f"{', '.join(schema.names)}"
            )
        from pyarrow import types

        kind = schema.field(self.field).type
        stored = kind.value_type if types.is_dictionary(kind) else kind
        texts = types.is_string, types.is_large_string, types.is_string_view, types.is_null
        if not any(check(stored) for check in texts):
            raise DataError(
                f"{origin}: field {self.field!r} (data.text_field) holds {kind}, not text"
            )
        return [self.field]

    def of_table(self, origin: str, table: Any, first: int, count: RowCount) -> Iterator[str]:
        return filter(None, map(count.count_text, table.column(0).to_pylist()))

    def pieces(self, document: str) -> Iterator[TextChunk]:
        return cut([document])
