"""Texts in chunks of bounded length, so that a document may be larger than memory."""

import codecs
import re
from collections.abc import Iterable, Iterator
from typing import IO, NamedTuple

LONGEST = 2**22
"""Maximum characters of a text chunk. Chunks are tokenized separately: around a cut, the tokens may
differ from the tokens of the whole document."""
_READ = 2**20
_LINE_START = re.compile(r"\n(?=\S)")


class TextChunk(NamedTuple):
    """Consecutive text of a document."""

    text: str
    ends: bool
    """Whether the document ends with this chunk."""
    append_eos: bool = True
    """Whether an EOS token is appended to the document."""


def cut(chunks: Iterable[str]) -> Iterator[TextChunk]:
    """Yield the text chunks of one document, given as consecutive strings of any length.

    A chunk ends at the end of a line if the next line does not begin with white space; most
    tokenizers that divide texts into words have a boundary there. If the second half of a chunk has
    no such line end, the chunk ends anywhere.
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
    """Yield the text of a file in strings of bounded length.

    Raises:
        UnicodeDecodeError: the file is not UTF-8; the error's `start` is an offset in the file.
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
            text = text.removeprefix("\ufeff")  # byte order mark
        before += len(content)
        if text:
            yield text
        if not content:
            return
