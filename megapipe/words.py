"""Numbers in sentences, errors in a line, and what is left out of them."""

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
"""With one slash where a URL was taken for a path."""
_END = r"\S*?(?=[\"')\]}>,:;.]*(?:\s|$))"
"""The rest of a word, but for signs of the sentence or the JSON that it stands in."""
_FIELDS = re.compile(rf"\?(?=[\w.-]+=){_END}")
"""The query of a URL that has fields, also where the URL is cut off before it."""
_QUERY = re.compile(rf"(https?:/{{1,2}}[^\s?#\"]*)[?#]{_END}")
REDACTED = "?***"
"""Stands where the query of a URL was."""


def without_user_info(text: str) -> str:
    """The text, and its URLs without the names and passwords of users that are in them."""
    return _USER_IN_URL.sub(r"\1", text)


def without_secrets(text: str) -> str:
    """The text, and its URLs without users and without queries, which may be signatures or tokens:
    whatever is printed or written goes through here."""
    text = without_user_info(_FIELDS.sub(REDACTED, text))
    return _QUERY.sub(rf"\1{REDACTED}", text)


def printable(text: str) -> str:
    """The text on one line that any terminal can show."""
    return text if text.isprintable() else json.dumps(text)


def without_surrogates(text: str) -> str:
    """Replace each lone surrogate, which JSON may spell and UTF-8 may not, by "?"."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def clipped(text: str) -> str:
    """The text on one line of at most 60 characters, without secrets."""
    text = without_secrets(printable(text))
    return text if len(text) <= 60 else text[:57] + "..."


def count_noun(number: int, noun: str) -> str:
    """The number and its noun: 1 step, 1,000 steps, 8 processes."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """The noun as it stands beside the number: with s, or es after s and ch, unless that is 1."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


ANY_WIDTH = 10_000
"""Columns of what is no terminal, unless the variable COLUMNS says how many."""


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream, which may have been closed, is a terminal."""
    return stream is not None and stream.isatty()


def columns() -> int:
    """Columns of the terminal that stdout is, or as many as the variable COLUMNS says."""
    asked = os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if asked or is_terminal(sys.stdout) else ANY_WIDTH


def folded(text: str) -> str:
    """The text, with lines that are wider than the terminal going on below; where a line begins
    with a word and a gap, as in `model    4 layers`, they go on behind the gap."""
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
    """Print lines, :func:`folded` to the terminal."""
    print(folded("\n".join(lines)), flush=True)


def table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Cells in columns, the first so many of them aligned to the left and the others to the right.

    Where the terminal has no room for all, the last ones are left out, and a line names them.
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
    """The values of `name` that divide `size`, the eight nearest to `near`."""
    divisors = [d for d in range(1, min(size, 4096) + 1) if size % d == 0]
    return f"{name} could be {join_or(sorted(sorted(divisors, key=lambda d: abs(d - near))[:8]))}"


def nearest_multiples(value: int, factor: int) -> str:
    """The multiples of `factor` next to `value`."""
    below = value // factor * factor
    return f"expected a multiple, such as {join_or([m for m in (below, below + factor) if m])}"


def join_or(values: Sequence[int | str]) -> str:
    """Return the values in words: 1, 2 or 4."""
    return _listed(values, "or")


def together(values: Sequence[int | str]) -> str:
    """The values in words: 1, 2 and 4."""
    return _listed(values, "and")


def _listed(values: Sequence[int | str], word: str) -> str:
    *head, last = map(str, values)
    return f"{', '.join(head)} {word} {last}" if head else last


def ranges(numbers: Iterable[int]) -> str:
    """The numbers in words: 1-3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


def one_line(error: BaseException) -> str:
    """The text of an exception of another library, on one line of bounded length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:297] + "..."
