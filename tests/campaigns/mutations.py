"""Random changes of valid input: of bytes, of lines, and of what is inside a JSON document."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**40, 2**47, 2**63 - 1, 2**63, -(2**63), 2**64 - 1)
ODD: tuple[Any, ...] = (
    *NUMBERS, 10**30, 0.5, -0.0, 1e308, True, None, "", "a", "\ud800", "../x", "/etc/passwd", "\0",
    "x" * 1000, [], {}, [[]], [0] * 100, {"a": {}}, "model/x", "00000-0000.safetensors",
)  # fmt: skip
"""Values for any place of a JSON document."""
WORDS = (
    "null", "~", "true", "yes", "-1", "0", "1e999", ".nan", "9" * 50, "1_000", "0x10", "1:30",
    "[", "]", "{", "}", "&a", "*a", "!!x", "- ", ": ", "\t", "'", '"', "|", ">", "%", "#", "? ",
    "\u2028", "\x00", "x" * 1000, "[[[[[[[[[[", "model:", "train.steps: 3", "---", "...", "<<: *a",
    "\ufeff", "\r",
)  # fmt: skip
"""Text for any place of a YAML document."""


def mutate_bytes(data: bytes, rng: random.Random, *, same_length: bool = False) -> bytes:
    """Make one to eight changes of bits and whole numbers. Unless it is to have the `same_length`,
    parts are also cut, doubled or made random, and the end comes early."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(len(found) + 1)
        length = rng.choice((1, 2, 4, 8, rng.randint(1, 64)))
        kind = rng.randrange(2 if same_length else 6)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            number = rng.choice(NUMBERS) % 2 ** (8 * length)
            at = min(at, len(found) - length) if same_length else at
            found[at : at + length] = number.to_bytes(length, "little")
        elif kind == 2:
            del found[at : at + length]
        elif kind == 3:
            found[at:at] = rng.randbytes(length)
        elif kind == 4:
            found[at:at] = found[at : at + length]
        else:
            del found[at:]
    return bytes(found)


def mutate_text(text: str, rng: random.Random) -> str:
    """Remove, double or move one to six lines of a document, or put another word in them."""
    lines = text.splitlines(keepends=True)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(lines) + 1)
        word = rng.choice(WORDS)
        kind = rng.randrange(5)
        if at == len(lines) or kind == 0:
            lines.insert(at, rng.choice((f"{word}\n", f"  {word}", f"{word}: {word}\n")))
        elif kind == 1:
            del lines[at]
        elif kind == 2:
            lines.insert(rng.randrange(len(lines)), lines[at])
        else:
            line = lines[at]
            start = line.find(":") + 2 if kind == 3 else rng.randrange(len(line) + 1)
            lines[at] = (
                f"{line[:start]}{word}\n" if kind == 3 else line[:start] + word + line[start:]
            )
    return "".join(lines)


def mutate_json(document: Any, rng: random.Random) -> Any:
    """Change, add or remove values at one to four places of a document, in place, and return it."""
    for _ in range(rng.randint(1, 4)):
        places = list(_places(document))
        if not places:
            return rng.choice(ODD)
        holder, key = rng.choice(places)
        kind = rng.randrange(4)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice((f"{key}x", "", "a", str(rng.choice(NUMBERS))))] = holder[key]
        elif kind == 2 and isinstance(holder, list):
            holder.append(holder[key])
        else:
            number = isinstance(holder[key], int) and rng.random() < 0.5
            holder[key] = holder[key] + rng.choice((-1, 1)) if number else rng.choice(ODD)
    return document


def _places(document: Any) -> Any:
    """Yield each container in a document with each of its keys."""
    if isinstance(document, dict | list):
        keys = list(document) if isinstance(document, dict) else range(len(document))
        for key in keys:
            yield document, key
            yield from _places(document[key])
