"""Texts from JSON: one object per line, or an array of objects over several lines."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from megapipe.data.corpus.row_count import RowCount
from megapipe.data.corpus.text_chunks import decoded
from megapipe.errors import DataError
from megapipe.text import one_line

_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_AT_ONCE = 2**20
"""Number of characters read at a time; while a JSON value is incomplete, the text is doubled."""
_LONGEST_WORD = len("-Infinity")
"""Length of the longest JSON word. An error this close to the end of the text may be due to an
incomplete word, so more text is read."""


class RowReader(Protocol):
    """Extracts documents from the rows of one file."""

    @property
    def origin(self) -> str:
        """Description of the file, for errors."""

    def text(self, row: Any, line: int) -> str | None:
        """Return the document of a row; None if the row has no document. `line`: number of the
        row's line, for errors. Raises DataError for an invalid row."""

    def finish(self) -> None:
        """Raise a DataError if the rows so far show that the file has no valid rows."""


class Field:
    """Extracts documents from rows that have a text in one of their fields.

    Args:
        name: ``data.text_field``.
        origin: description of the rows' file, for errors.
        count: counts the rows.
    """

    def __init__(self, name: str, origin: str, count: RowCount) -> None:
        self.name = name
        self.origin = origin
        self._count = count
        self._others: list[str] | None = None
        self._found = False

    def text(self, row: Any, line: int) -> str | None:
        """Return the text of a row; None if the row has no text.

        Raises:
            DataError: the row is not an object, or its field is not text.
        """
        if not isinstance(row, dict):
            raise no_object(self.origin, row, line)
        if self.name not in row:
            self._count.rows += 1
            self._count.lacking += 1
            self._others = self._others or list(row)
            return None
        self._found = True
        value = row[self.name]
        if value is not None and not isinstance(value, str):
            raise DataError(
                f"{self.origin}: field {self.name!r} (data.text_field) holds "
                f"{kind_of(value)}, not text, in line {line}"
            )
        return self._count.count_text(value)

    def finish(self) -> None:
        """Raise a DataError if there were rows and none of them had the field. Call this only after
        the first shard of a file: its rows stand for the whole file."""
        if self._others is not None and not self._found:
            raise DataError(
                f"{self.origin}: no field {self.name!r} (data.text_field); it has: "
                f"{', '.join(self._others)}"
            )


def of_lines(lines: Iterable[bytes], field: RowReader, first: int) -> Iterator[str]:
    """Yield the documents that the row reader `field` extracts from lines of JSON. `first` is the
    number of the first line.

    Raises:
        DataError: a line is not a JSON object, or `field` finds it invalid.
    """
    for number, line in enumerate(lines, first):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError, or not UTF-8
            raise DataError(
                f"{field.origin}: cannot be read (line {number}: {_plain(error)})"
            ) from error
        text = field.text(row, number)
        if text is not None:
            yield text


def of_values(file: IO[bytes], field: RowReader) -> Iterator[str]:
    """Yield the documents that the row reader `field` extracts from a JSON array of objects, or
    from consecutive objects; an object may span several lines. Raises DataError for invalid JSON or
    an invalid row."""
    try:
        for row, line in _values(decoded(file)):
            text = field.text(row, line)
            if text is not None:
                yield text
    except (ValueError, RecursionError) as error:
        raise DataError(f"{field.origin}: cannot be read ({_plain(error)})") from error
    field.finish()


def _values(chunks: Iterator[str]) -> Iterator[tuple[Any, int]]:
    """Yield each JSON value with the number of the line where it begins."""
    decoder = json.JSONDecoder()
    text, at, line, inside = "", 0, 1, False
    while True:
        begin, at = at, (_BETWEEN if inside else _SPACE).match(text, at).end()  # type: ignore[union-attr]
        line += text.count("\n", begin, at)
        if text[at : at + 1] == ("]" if inside else "["):
            inside, at = not inside, at + 1
            continue
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            rest, more = text[at:], ""
            if error.pos > len(text) - _LONGEST_WORD or error.msg.startswith("Unterminated string"):
                more = "".join(islice(chunks, 1 + len(rest) // _AT_ONCE))
            if not more and (rest or inside):
                line += text.count("\n", at, error.pos)
                raise ValueError(f"line {line}: {error.msg}") from None
            if not more:
                return
            text, at = rest + more, 0
            continue
        yield value, line
        line += text.count("\n", at, end)
        at = end


def line_of(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that contains byte `offset` of a file."""
    line = 1
    with open(path, "rb") as file:
        while offset > 0 and (content := file.read(min(offset, 2**24))):
            line += content.count(b"\n")
            offset -= len(content)
    return line


def _plain(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):  # single line: the error's line count is useless
        return f"{error.msg} at character {error.pos}"
    return one_line(error)


def no_object(origin: str, row: Any, line: int) -> DataError:
    """Return the error for a row that is not an object."""
    return DataError(f"{origin}: line {line} holds {kind_of(row)}, not an object with fields")


def kind_of(value: Any) -> str:
    """Return the name of a value's JSON type."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return names.get(type(value), "null" if value is None else "a number")
