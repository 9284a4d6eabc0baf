"""Numbers in sentences, errors in a line, and what is left out of them."""

import re
from collections.abc import Iterable, Sequence

_USER_IN_URL = re.compile(r"(:/{1,2})[^/@\s]+@")
"""With one slash where a URL was taken for a path."""
_END = r"\S*?(?=[\"')\]}>,:;.]*(?:\s|$))"
"""The rest of a word, but for signs of the sentence or the JSON that it stands in."""
_FIELDS = re.compile(rf"\?(?=[\w.-]+=){_END}")
"""The query of a URL that has fields, also where the URL is cut off before it."""
_QUERY = re.compile(rf"(https?:/{{1,2}}[^\s?#\"]*)[?#]{_END}")
LEFT_OUT = "?***"
"""Stands where the query of a URL was."""


def without_user_info(text: str) -> str:
    """The text, and its URLs without the names and passwords of users that are in them."""
    return _USER_IN_URL.sub(r"\1", text)


def without_secrets(text: str) -> str:
    """The text, and its URLs without users and without queries, which may be signatures or tokens:
    whatever is printed or written goes through here."""
    text = without_user_info(_FIELDS.sub(LEFT_OUT, text))
    return _QUERY.sub(rf"\1{LEFT_OUT}", text)


def counted(number: int, noun: str) -> str:
    """The number and its noun: 1 step, 1,000 steps, 8 processes."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: int) -> str:
    """The noun as it stands beside the number: with s, or es after s and ch, unless that is 1."""
    if number == 1:
        return noun
    return f"{noun}es" if noun.endswith(("s", "ch")) else f"{noun}s"


def table(rows: Sequence[Sequence[str]], *, left: int) -> str:
    """Cells in columns, the first so many of them aligned to the left and the others to the
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def choices(name: str, size: int, near: int) -> str:
    """The values of `name` that divide `size`, the eight nearest to `near`."""
    divisors = [d for d in range(1, min(size, 4096) + 1) if size % d == 0]
    return f"{name} could be {either(sorted(sorted(divisors, key=lambda d: abs(d - near))[:8]))}"


def multiples(value: int, factor: int) -> str:
    """The multiples of `factor` next to `value`."""
    below = value // factor * factor
    return f"expected a multiple, such as {either([m for m in (below, below + factor) if m])}"


def either(values: Sequence[int | str]) -> str:
    """The values in words: 1, 2 or 4."""
    *head, last = map(str, values)
    return f"{', '.join(head)} or {last}" if head else last


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
