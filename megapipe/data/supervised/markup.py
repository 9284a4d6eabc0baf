"""Texts with marks. A mark says that characters are labels, or that they are plain text even if
they spell a special token.

The marks are characters that Unicode reserves for internal use by programs; they are removed from
the texts of a corpus before marks are added. So an example is a single text until it is tokenized.
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
"""Mark characters; END stands for the EOS token of a document."""
_MARKS = f"{_PLAIN}-{END}"
_MARK = re.compile(f"[{_MARKS}]")
_SIDES = re.compile(f"[{_COUNTED}{_COUNTED_STOP}]")
_SEGMENTS = re.compile(
    f"{_PLAIN}(?P<plain>[^{_MARKS}]*){_PLAIN_STOP}|(?P<end>{END})|(?P<rendered>[^{_MARKS}]+)"
)


def plain(text: str) -> str:
    """Mark a text as plain: it is tokenized separately, and names of special tokens are text."""
    return f"{_PLAIN}{_MARK.sub('', text)}{_PLAIN_STOP}"


def mark_label(text: str) -> str:
    """Mark a text as a label."""
    return f"{_COUNTED}{text}{_COUNTED_STOP}"


def mark_spans(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Mark the characters in `spans`, which are in ascending order, as labels."""
    parts, at = [], 0
    for start, stop in spans:
        parts += [text[at:start], mark_label(text[start:stop])]
        at = stop
    return "".join([*parts, text[at:]])


def sanitized(value: Any, names: Collection[str]) -> Any:
    """Return a JSON value with all `names` of tokens in its texts marked as plain text."""
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
    """Return a pattern that finds any of the names, longer names first; None without names."""
    if not names:
        return None
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))


def encode(text: str, tokenizer: Tokenizer) -> tuple[TokenIds, npt.NDArray[np.bool_]]:
    """Tokenize a marked text; return the tokens [n], and which tokens are labels [n]. A token is a
    label if one of its characters is."""
    sides = _SIDES.split(text)
    text = "".join(sides)
    inside = np.repeat(np.arange(len(sides)) % 2, [len(side) for side in sides])
    before = np.concatenate([[0], np.cumsum(inside)])
    """Number of label characters before each character."""
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
