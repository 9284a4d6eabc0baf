"""Files of a bucket."""

from __future__ import annotations

TEXTS = {
    "a/1.txt": b"one",
    "a/2.jsonl": b'{"text": "two"}\n',
    "a/deep/3.txt": b"three",
    "b.txt": b"b",
}
