"""Takes texts out of the rows of a corpus: of JSON, of tables, of data sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megapipe.data.corpus.cutting import TextChunk, cut
from megapipe.data.corpus.json_rows import Field, RowReader
from megapipe.data.corpus.row_count import RowCount
from megapipe.errors import DataError


class RowParser(Protocol):
    """How rows become documents; may be sent to another process."""

    @property
    def takes_texts(self) -> bool:
        """Whether a file that has no rows is a document too."""

    def reader(self, origin: str, count: RowCount) -> RowReader:
        """Takes documents out of the rows of a JSON file, and counts those that lack one."""

    def columns(self, origin: str, schema: Any) -> list[str]:
        """The columns of a table of that ``pyarrow.Schema`` that it needs. Raises DataError if they
        are not there, or hold something else."""

    def of_table(self, origin: str, table: Any, first: int, count: RowCount) -> Iterator[str]:
        """Yield the documents of a table of these columns, whose first row has the number `first`,
        and count the rows that lack one."""

    def pieces(self, document: str) -> Iterator[TextChunk]:
        """A document in the pieces that are tokenized."""


@dataclass(frozen=True)
class TextRows:
    """The text in one field of each row."""

    field: str
    """``data.text_field``."""
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
                f"{origin}: field {self.field!r} (data.text_field) holds {kind}, no text"
            )
        return [self.field]

    def of_table(self, origin: str, table: Any, first: int, count: RowCount) -> Iterator[str]:
        return filter(None, map(count.count_text, table.column(0).to_pylist()))

    def pieces(self, document: str) -> Iterator[TextChunk]:
        return cut([document])
