"""Texts for people: numbers with nouns, lists in words, tables, and lines without secrets."""

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TextIO

_LABEL = re.compile(r"\s*\S+(?: \S+)?\s{2,}(?=\S)")
_USER_IN_URL = re.compile(r"(:/{1,2})[^/@\s]+@")
"""Pattern of user and password in a URL. A URL that was parsed as a path has only one slash after
the colon."""
_END = r"\S*?(?=[\"')\]}>,:;.]*(?:\s|$))"
"""Pattern of the rest of a word, up to punctuation (of a sentence or JSON) at its end."""
_FIELDS = re.compile(rf"\?(?=[\w.-]+=){_END}")
"""Pattern of the fields of a URL's query, which may stand without the URL."""
_QUERY = re.compile(rf"(https?:/{{1,2}}[^\s?#\"]*)[?#]{_END}")
REDACTED = "?***"
"""Replacement for the query of a URL."""


def without_user_info(text: str) -> str:
    """Return the text without the user names and passwords in its URLs."""
    return _USER_IN_URL.sub(r"\1", text)


def without_secrets(text: str) -> str:
    """Return the text without users and queries (signatures, tokens) in its URLs. Use this for
    everything that is printed or written."""
    text = without_user_info(_FIELDS.sub(REDACTED, text))
    return _QUERY.sub(rf"\1{REDACTED}", text)


def printable(text: str) -> str:
    """Return the text as one line that any terminal can show."""
    return text if text.isprintable() else json.dumps(text)


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate by "?". JSON can contain lone surrogates, but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def clipped(text: str) -> str:
    """Return the text as one line of at most 60 characters, without secrets."""
    text = without_secrets(printable(text))
    return text if len(text) <= 60 else text[:57] + "..."


def count_noun(number: int, noun: str) -> str:
    """Return `number` and `noun` in its singular or plural: 1 step, 1,000 steps, 8 processes."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """Return `noun` if `number` is 1, else its plural: with es after s and ch, otherwise with s."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


ANY_WIDTH = 10_000
"""Width of a stream that is not a terminal, unless the environment variable COLUMNS sets one."""


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal. The stream may have been closed."""
    return stream is not None and stream.isatty()


def columns() -> int:
    """Return the width of the terminal on stdout; the environment variable COLUMNS overrides it."""
    asked = os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if asked or is_terminal(sys.stdout) else ANY_WIDTH


def folded(text: str) -> str:
    """Wrap lines that are wider than the terminal. If a line begins with a label and a gap, as
    `model 4 layers` does, its continuation lines are indented to the end of the gap."""
    width, lines = columns(), []
    for line in text.split("\n"):
        label = _LABEL.match(line)
        indent = len(label[0]) if label else len(line) - len(line.lstrip()) + 2
        lines += (
            textwrap.wrap(
                line,
                max(width, indent + 20),
                subsequent_indent=" " * indent,
                drop_whitespace=True,
                break_long_words=False,
                break_on_hyphens=False,
            )
            if len(line) > width
            else [line]
        )
    return "\n".join(lines)


def print_folded(*lines: str) -> None:
    """Print lines, wrapped to the terminal (:func:`folded`)."""
    print(folded("\n".join(lines)), flush=True)


def table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Format rows as a table. The first `left` columns are aligned left, the others right.

    If the terminal is too narrow, columns at the right end are omitted, and a line below the table
    names them.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    shown = len(widths)
    while shown > 1 and sum(widths[:shown]) + 2 * (shown - 1) > columns():
        shown -= 1
    lines = [
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row[:shown], widths, strict=False))
        ).rstrip()
        for row in rows
    ]
    if shown < len(widths):
        left_out = ", ".join(filter(None, rows[0][shown:]))
        lines.append(folded(f"no room for: {left_out} (a wider terminal or a pipe shows them)"))
    return "\n".join(lines)


def divisors_hint(name: str, size: int, near: int) -> str:
    """Return a hint for `name`: the eight divisors of `size` that are nearest to `near`."""
    divisors = [d for d in range(1, min(size, 4096) + 1) if size % d == 0]
    return f"{name} could be {join_or(sorted(sorted(divisors, key=lambda d: abs(d - near))[:8]))}"


def nearest_multiples(value: int, factor: int) -> str:
    """Return a hint with the multiples of `factor` on both sides of `value`."""
    below = value // factor * factor
    return f"expected a multiple, such as {join_or([m for m in (below, below + factor) if m])}"


def join_or(values: Sequence[int | str]) -> str:
    """Return the values as a text: 1, 2 or 4."""
    return _listed(values, "or")


def together(values: Sequence[int | str]) -> str:
    """Return the values as a text: 1, 2 and 4."""
    return _listed(values, "and")


def _listed(values: Sequence[int | str], word: str) -> str:
    *head, last = map(str, values)
    return f"{', '.join(head)} {word} {last}" if head else last


def ranges(numbers: Iterable[int]) -> str:
    """Return the numbers as a text: 1-3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def one_line(error: BaseException) -> str:
    """Return the text of another library's exception, as one line of at most 300 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
