"""Texts of JSON: one object a line, or an array of objects over several lines."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Protocol

from megapipe.data.corpus.cutting import decoded
from megapipe.data.corpus.row_count import RowCount
from megapipe.errors import DataError
from megapipe.words import one_line

_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")
_AT_ONCE = 2**20
"""Characters of a value that is longer than what was read, before as much again is read."""
_LONGEST_WORD = len("-Infinity")
"""An error that far from the end of what was read is none that more text can mend."""


class RowReader(Protocol):
    """Takes documents out of the rows of one file."""

    @property
    def origin(self) -> str:
        """The file of the rows, for errors."""

    def text(self, row: Any, line: int) -> str | None:
        """The document of a row; None if it has none. Raises DataError for a row that is wrong."""

    def finish(self) -> None:
        """Raise a DataError if the rows so far say that all of them are wrong."""


class Field:
    """Takes the text out of rows.

    Args:
        name: ``data.text_field``.
        origin: what the rows are of, for errors.
        count: where they are counted.
    """

    def __init__(self, name: str, origin: str, count: RowCount) -> None:
        self.name = name
        self.origin = origin
        self._count = count
        self._others: list[str] | None = None
        self._found = False

    def text(self, row: Any, line: int) -> str | None:
        """The text; None if the row has none.

        Raises:
            DataError: the row is no object, or its field is no text.
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
                f"{self.origin}: field {self.name!r} (data.text_field) holds {kind_of(value)}, no "
                f"text, in line {line}"
            )
        return self._count.count_text(value)

    def finish(self) -> None:
        """Raise a DataError if there were rows, and none of them had the field. It is asked after
        the first rows of a file, which stand for all."""
        if self._others is not None and not self._found:
            raise DataError(
                f"{self.origin}: no field {self.name!r} (data.text_field); it has: "
                f"{', '.join(self._others)}"
            )


def of_lines(lines: Iterable[bytes], field: RowReader, first: int) -> Iterator[str]:
    """The texts of lines, of which the first has the number `first`.

    Raises:
        DataError: a line is no JSON object, or has no text in `field`.
    """
    for number, line in enumerate(lines, first):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError, no UTF-8
            raise DataError(
                f"{field.origin}: cannot be read (line {number}: {_plain(error)})"
            ) from error
        text = field.text(row, number)
        if text is not None:
            yield text


def of_values(file: IO[bytes], field: RowReader) -> Iterator[str]:
    """The texts of an array of objects, or of objects that follow one another, whatever their
    lines. Raises as :func:`of_lines` does."""
    try:
        for row, line in _values(decoded(file)):
            text = field.text(row, line)
            if text is not None:
                yield text
    except (ValueError, RecursionError) as error:
        raise DataError(f"{field.origin}: cannot be read ({_plain(error)})") from error
    field.finish()


def _values(chunks: Iterator[str]) -> Iterator[tuple[Any, int]]:
    """Each value, and the line that it begins in."""
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
    """Number of the line at an offset of a file."""
    line = 1
    with open(path, "rb") as file:
        while offset > 0 and (content := file.read(min(offset, 2**24))):
            line += content.count(b"\n")
            offset -= len(content)
    return line


def _plain(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):  # a single line: its own count says nothing
        return f"{error.msg} at character {error.pos}"
    return one_line(error)


def no_object(origin: str, row: Any, line: int) -> DataError:
    """The error for a row that is none."""
    return DataError(f"{origin}: line {line} holds {kind_of(row)}, no object with fields")


def kind_of(value: Any) -> str:
    """The name of a value's type in JSON."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return names.get(type(value), "null" if value is None else "a number")
