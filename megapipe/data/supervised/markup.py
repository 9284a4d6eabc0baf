"""Texts with marks: what of them is a label, and what is plain whatever it spells.

The marks are characters that Unicode reserves for such uses inside of a program; they are taken out
of all that comes from a corpus. So an example is one text on its way from the process that reads it
to the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from megapipe.data.tokenizer import TokenIds, Tokenizer

_PLAIN, _PLAIN_STOP, _COUNTED, _COUNTED_STOP, END = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4"
"""END: the end mark of a document."""
_MARKS = f"{_PLAIN}-{END}"
_MARK = re.compile(f"[{_MARKS}]")
_SIDES = re.compile(f"[{_COUNTED}{_COUNTED_STOP}]")
_SEGMENTS = re.compile(
    f"{_PLAIN}(?P<plain>[^{_MARKS}]*){_PLAIN_STOP}|(?P<end>{END})|(?P<rendered>[^{_MARKS}]+)"
)


def plain(text: str) -> str:
    """A text that is tokenized by itself, and none of whose names of tokens is one."""
    return f"{_PLAIN}{_MARK.sub('', text)}{_PLAIN_STOP}"


def mark_label(text: str) -> str:
    """A marked text that is a label."""
    return f"{_COUNTED}{text}{_COUNTED_STOP}"


def count(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """A text whose characters in `spans`, which follow one another, are labels."""
    parts, at = [], 0
    for start, stop in spans:
        parts += [text[at:start], mark_label(text[start:stop])]
        at = stop
    return "".join([*parts, text[at:]])


def sanitized(value: Any, names: Collection[str]) -> Any:
    """A value of JSON in whose texts `names` of tokens are plain."""
    if isinstance(value, str):
        found = _names(tuple(names))
        value = _MARK.sub("", value)
        return value if found is None else found.sub(lambda name: plain(name[0]), value)
    if isinstance(value, dict):
        return {key: sanitized(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [sanitized(each, names) for each in value]
    return value


@lru_cache(8)
def _names(names: tuple[str, ...]) -> re.Pattern[str] | None:
    """A pattern that finds any of them, the longest first."""
    if not names:
        return None
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def encode(text: str, tokenizer: Tokenizer) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
    """Tokens of a marked text [n], and which of them are labels [n]: those that have a character
    that counts."""
    sides = _SIDES.split(text)
    text = "".join(sides)
    inside = np.repeat(np.arange(len(sides)) % 2, [len(side) for side in sides])
    before = np.concatenate([[0], np.cumsum(inside)])
    """Characters that count, before each."""
    ids: list[TokenIds] = [np.empty(0, np.int32)]
    labels: list[npt.NDArray[np.bool_]] = [np.empty(0, np.bool_)]
    for found in _SEGMENTS.finditer(text):
        start, stop = found.span()
        if found["rendered"] is not None:
            placed = tokenizer.encode_rendered(found["rendered"])
            ids.append(placed.ids)
            labels.append(before[start + placed.stops] > before[start + placed.starts])
        else:
            some = [tokenizer.eod] if found["end"] else tokenizer.encode(found["plain"])
            ids.append(np.asarray(some, np.int32))
            labels.append(np.full(len(some), before[stop] > before[start]))
    return np.concatenate(ids), np.concatenate(labels)
