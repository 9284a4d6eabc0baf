"""A bucket in memory with a few texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

TEXTS = {
    "a/1.txt": b"one",
    "a/2.jsonl": b'{"text": "two"}\n',
    "a/deep/3.txt": b"three",
    "b.txt": b"b",
}
"""Objects of the bucket, by name."""


@contextmanager
def filled() -> Iterator[Any]:
    """Yield the file system with :data:`TEXTS` below memory://bucket; remove the bucket in the
    end."""
    system = fsspec.filesystem("memory")
    for name, content in TEXTS.items():
        system.pipe(f"/bucket/{name}", content)
    yield system
    system.rm("/bucket", recursive=True)
