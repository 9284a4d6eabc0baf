"""Bytes that operations allocate and free, one after the other, and their peak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class PutOff:
    """A weight gradient that a B computes beside the next gather, and the bytes freed then."""

    matrix: str
    frees: int


class Tape:
    """Bytes that are held now, and the most that ever were."""

    def __init__(self, now: int = 0) -> None:
        self.now = self.peak = now
        self.put_off: PutOff | None = None

    def take(self, *sizes: int) -> None:
        self.now += sum(sizes)
        self.peak = max(self.peak, self.now)

    def drop(self, *sizes: int) -> None:
        self.now -= sum(sizes)
        assert self.now >= 0, "more is freed than was held"

    def pass_by(self, *sizes: int) -> None:
        """Take bytes that exist for a moment only."""
        self.take(*sizes)
        self.drop(*sizes)
