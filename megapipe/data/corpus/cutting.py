"""Texts in pieces of bounded length, so that a document may be longer than memory."""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

LONGEST = 2**22
"""Characters of a piece at most. Each piece is tokenized by itself: where a longer document is cut,
a tokenizer may give other tokens than it would give for the whole."""
_READ = 2**20
_LINE_START = re.compile(r"\n(?=\S)")


class TextChunk(NamedTuple):
    """A part of a document."""

    text: str
    ends: bool
    """Whether the document ends with it."""
    end_mark: bool = True
    """Whether an end mark follows the document."""


def cut(chunks: Iterable[str]) -> Iterator[TextChunk]:
    """The pieces of one document that comes in chunks of any length.

    A piece ends at the end of a line that another follows which begins with no white space; most
    tokenizers that divide texts into words have a border there. Where the second half of a piece
    has none, it ends anywhere.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        while len(text) > LONGEST:
            at = _last_line_start(text)
            yield TextChunk(text[:at], ends=False)
            text = text[at:]
    yield TextChunk(text, ends=True)


def _last_line_start(text: str) -> int:
    end = LONGEST
    while (end := text.rfind("\n", LONGEST // 2, end)) >= 0:
        if _LINE_START.match(text, end):
            return end + 1
    return LONGEST


def decoded(file: IO[bytes]) -> Iterator[str]:
    """The text of a file in chunks.

    Raises:
        UnicodeDecodeError: it is no UTF-8; `start` counts from the beginning of the file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    while True:
        content = file.read(_READ)
        waiting = len(decoder.getstate()[0])
        try:
            text = decoder.decode(content, final=not content)
        except UnicodeDecodeError as error:
            start = before - waiting + error.start
            wrong = error.object[error.start : error.start + 1]
            raise UnicodeDecodeError("utf-8", wrong, start, start + 1, error.reason) from None
        if not before:
            text = text.removeprefix("\ufeff")  # a mark of the encoding
        before += len(content)
        if text:
            yield text
        if not content:
            return
